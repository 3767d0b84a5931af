"""DropIT (arXiv 2202.13808) as its users write it: `from mesa_tune.compat.dropit import to_dropit`."""

from mesa_tune.compat.dropit import dropiter
from mesa_tune.compat.dropit.dropiter import DropITer, to_dropit

__all__ = ["DropITer", "dropiter", "to_dropit"]
