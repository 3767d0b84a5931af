"""Training steps as people take them: `STEPS`, what each is, and how it goes.

Each has a model whose blocks may run again or in slices, and a step that leaves gradients in the parameters
and returns what the user would log.
"""

from tests.steps.cases.layers import LAYERS
from tests.steps.cases.several import SEVERAL
from tests.steps.cases.stateful import STATEFUL
from tests.steps.cases.varying import VARYING

STEPS = VARYING | STATEFUL | SEVERAL | LAYERS
