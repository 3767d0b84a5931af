"""A module that runs again, or in slices, does what it did first, whatever state in Python it uses.

Each case is a block with something around its linear layers, trained for some steps plain, with
`store: recompute` and with `tile`.
"""

import itertools
import random
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from copy import deepcopy
from random import uniform
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.conversion.python_state.watch import undone
from mesa_tune.conversion.sliced import has_slices
from tests.builders import conversion, policy_of

WIDTH, STEPS = 16, 5
GENERATOR = torch.Generator()
CALLS = 0
LOG: list[int] = []
Forward = Callable[[Any, Any], Any]


class Block(nn.Module):
    """Two linear layers, and what `function` does before them."""

    made = 0
    seen: list[int] = []  # noqa: RUF012 - shared by all on purpose

    def __init__(self, function: Forward, **state: Any) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), function
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        x = self.function(self, x)
        return x + self.down(F.gelu(self.up(x)))


class Sized(nn.Module):
    """A counter in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / self.count


def python(m: Any, x: Tensor) -> Any:
    return x * random.random()


def imported(m: Any, x: Tensor) -> Any:
    return x * uniform(0.5, 2)


def local_import(m: Any, x: Tensor) -> Any:
    import random as draw

    return x * draw.random()


def later(m: Any, x: Tensor) -> Any:
    """Begin to draw in the third call."""
    m.calls += 1
    return x * random.random() if m.calls > 2 else x


def mixed(m: Any, x: Tensor) -> Any:
    """Roll the batch by a number that only a helper of the block draws."""
    return x.roll(drawn(), 0)


def drawn() -> int:
    return int(np.random.randint(8))


def own_generator(m: Any, x: Tensor) -> Any:
    return x * (1 + m.rng.random())


def torch_generator(m: Any, x: Tensor) -> Any:
    return x + torch.randn(WIDTH, generator=m.rng)


def global_generator(m: Any, x: Tensor) -> Any:
    return x + torch.randn(WIDTH, generator=GENERATOR)


def around() -> Forward:
    calls, generator = 0, torch.Generator()

    def forward(m: Any, x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return x * 0.5**calls + torch.randn(WIDTH, generator=generator)

    return forward


def counted(m: Any, x: Tensor) -> Any:
    m.calls += 1
    return x * 0.5**m.calls


def in_mapping(m: Any, x: Tensor) -> Any:
    m.calls["x"] += 1
    return x * 0.5 ** m.calls["x"]


def in_sequence(m: Any, x: Tensor) -> Any:
    m.calls.append(len(m.calls))
    return x * 0.5 ** len(m.calls)


def in_set(m: Any, x: Tensor) -> Any:
    m.calls.add(len(m.calls))
    return x * 0.5 ** len(m.calls)


def in_object(m: Any, x: Tensor) -> Any:
    m.calls.number += 1
    return x * 0.5**m.calls.number


def in_array(m: Any, x: Tensor) -> Any:
    m.calls += 1
    return x * 0.5 ** float(m.calls[0])


def in_class(m: Any, x: Tensor) -> Any:
    Block.made += 1
    m.seen.append(0)
    return x * 0.5 ** (Block.made + len(m.seen))


def in_globals(m: Any, x: Tensor) -> Any:
    globals()["CALLS"] = CALLS + 1
    LOG.append(CALLS)
    return x * 0.5 ** (CALLS + len(LOG))


def in_buffer(m: Any, x: Tensor) -> Any:
    return m.sized(x)


def in_tensor(m: Any, x: Tensor) -> Any:
    m.count += 1
    return x * 0.5**m.count


def iterated(m: Any, x: Tensor) -> Any:
    return x * 0.5 ** next(m.calls)


def penalized(m: Any, x: Tensor) -> Any:
    m.penalty = x.square().mean()
    return x


def listed(m: Any, x: Tensor) -> Any:
    m.penalties.append(x.square().mean())
    return x


def recurrent(m: Any, x: Tensor) -> Any:
    """Add what the step before left, which its next step replaces."""
    y = x + m.state
    m.state = x.detach().mean((0, 1))
    return y


def cached(m: Any, x: Tensor) -> Any:
    if m.table is None:
        m.table = torch.linspace(0, 1, WIDTH)
    return x * m.table


def rebuilt(m: Any, x: Tensor) -> Any:
    """Make a mask again in each call, as large as a sample."""
    m.mask = torch.ones(x.shape[1:]).tril()
    return x * m.mask


def noted(m: Any, x: Tensor) -> Any:
    m.width = x.shape[-1]
    return x


def asserted(m: Any, x: Tensor) -> Any:
    assert x.shape[0] == 8
    return x


class Case(NamedTuple):
    """A block; `cut`: it runs in slices. `again`: it runs again."""

    make: Callable[[], nn.Module]
    cut: bool = False
    again: bool = True


def case(function: Forward, *, cut: bool = False, again: bool = True, **state: Any) -> Case:
    return Case(lambda: Block(function, **deepcopy(state)), cut, again)


def hooked(hook: Callable[..., Any]) -> nn.Module:
    block = Block(lambda _, x: x)
    block.up.register_forward_hook(hook)
    return block


def counting_hook() -> nn.Module:
    calls: list[int] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(0)
        return output * 0.5 ** len(calls)

    return hooked(hook)


CASES: dict[str, Case] = {
    "random": case(python),
    "from random": case(imported),
    "a local import": case(local_import),
    "random, later": case(later, calls=0),
    "numpy in a helper": case(mixed),
    "random.Random": case(own_generator, rng=random.Random(1)),
    "numpy.Generator": Case(lambda: Block(own_generator, rng=np.random.default_rng(1))),
    "numpy.RandomState": case(lambda m, x: x * (1 + m.rng.rand()), rng=np.random.RandomState(1)),
    "torch.Generator": Case(lambda: Block(torch_generator, rng=torch.Generator())),
    "torch.Generator in a dict": Case(
        lambda: Block(lambda m, x: x + torch.randn(WIDTH, generator=m.rng["x"]), rng={"x": torch.Generator()})
    ),
    "a global torch.Generator": case(global_generator),
    "variables around it": Case(lambda: Block(around())),
    "an int": case(counted, calls=0),
    "a dict": case(in_mapping, calls={"x": 0}),
    "a Counter": case(in_mapping, calls=Counter()),
    "a defaultdict": case(in_mapping, calls=defaultdict(int)),
    "a list": case(in_sequence, calls=[]),
    "a deque": case(in_sequence, calls=deque(maxlen=3)),
    "a set": case(in_set, calls=set()),
    "an object": case(in_object, calls=SimpleNamespace(number=0)),
    "an array": case(in_array, calls=np.zeros(1)),
    "its class": case(in_class),
    "global variables": case(in_globals),
    "a buffer": Case(lambda: Block(in_buffer, sized=Sized())),
    "a tensor in place": Case(lambda: Block(in_tensor, count=torch.zeros(()))),
    "an iterator": Case(lambda: Block(iterated, calls=itertools.count(1)), again=False),
    "a penalty": case(penalized),
    "a list of penalties": Case(lambda: Block(listed, penalties=[])),
    "state of the last step": Case(lambda: Block(recurrent, state=torch.zeros(WIDTH))),
    "a cache": case(cached, cut=True, table=None),
    "a mask": case(rebuilt, cut=True),
    "a constant": case(noted, cut=True),
    "nothing": case(lambda m, x: x, cut=True),
    "an assertion": case(asserted),
    "a hook that counts": Case(counting_hook),
    "a hook": Case(lambda: hooked(lambda module, args, output: output * 2)),
    "in another": Case(lambda: nn.Sequential(Block(counted, calls=0), Block(python))),
}


def start() -> None:
    globals()["CALLS"] = Block.made = 0
    LOG.clear()
    Block.seen.clear()
    GENERATOR.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def described(value: Any) -> Any:
    """What can be compared of the state that a step leaves."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
        return [float(each) for each in (deepcopy(value).random(),)]
    if isinstance(value, (list, deque)):
        return list(map(described, value))
    return {name: described(one) for name, one in value.items()} if isinstance(value, dict) else repr(value)


def losses(block: nn.Module) -> Tensor:
    """Penalties that the forward has left."""
    left = [getattr(block, "penalty", None), *getattr(block, "penalties", ())]
    return sum((each for each in left if each is not None), torch.zeros(()))


def trained(make: Callable[[], nn.Module], rules: str | None) -> tuple[list[Any], nn.Module]:
    """Return gradients and state after each of some steps, and the block."""
    start()
    model, seen = nn.Sequential(nn.Linear(WIDTH, WIDTH), make()), list[Any]()
    if rules is not None:
        mt.convert(model, policy_of(rules), min_elements=10**9)
    for _ in range(STEPS):
        x = torch.randn(8, 4, WIDTH)
        model.zero_grad()
        (model(x).square().mean() + losses(model[1])).backward()
        getattr(model[1], "penalties", []).clear()
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        hidden = {"function", "forward", "_mesa_tune", "_replicate_for_data_parallel"}
        own = {name: v for name, v in vars(model[1]).items() if name not in {*vars(nn.Module()), *hidden}}
        shared = random.getstate(), float(np.random.rand()), CALLS, Block.made, GENERATOR.get_state().tolist()
        seen.append((described(own), shared, [buffer.tolist() for buffer in model.buffers()]))
    return seen, model[1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", ["store: recompute", "store: exact\n    tile: 4"], ids=["recompute", "tile"])
@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_steps_are_plains(name: str, rule: str) -> None:
    make, cut, again = CASES[name]
    expected, _ = trained(make, None)
    notice._given.clear()
    names = "1 1.0 1.1" if name == "in another" else "1"
    found, block = trained(make, f"on module:\n    by_name: {names}\n    {rule}\n")
    tiled = "tile" in rule
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-4 if tiled else 0, atol=1e-6 if tiled else 0)
        else:
            assert one == other
    assert has_slices(block) == (tiled and cut)
    refused = not again or (tiled and not cut)
    assert len(notice._given) == (0 if not refused else 3 if name == "in another" else 1)


def converted(rule: str | None, block: Block, run: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Return what `run` makes of the model and its input, and the gradient of a weight of the block."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), block)
    if rule is not None:
        mt.convert(model, policy_of(f"on module:\n    by_name: 1\n    {rule}\n"), min_elements=10**9)
    loss = run(model, torch.randn(8, 4, WIDTH))
    loss.backward()
    return loss.detach(), block.up.weight.grad  # type: ignore[return-value]


def through_list(model: Any, x: Tensor) -> Any:
    """The caller's list takes a penalty."""
    penalties: list[Tensor] = []

    def function(_: Any, given: tuple[Tensor, list[Tensor]]) -> Tensor:
        given[1].append(given[0].square().mean())
        return given[0]

    model[1].function = function
    return model[1]((model[0](x), penalties)).mean() + sum(penalties)


def through_object(model: Any, x: Tensor) -> Any:
    calls = SimpleNamespace(number=0)

    def function(_: Any, given: tuple[Tensor, Any]) -> Tensor:
        given[1].number += 1
        return given[0] * 0.5 ** given[1].number

    model[1].function = function
    return model[1]((model[0](x), calls)).square().mean() * calls.number


def hook_of_forward(model: Any, x: Tensor) -> Any:
    """A hook is there in the forward alone."""
    handle = model[1].up.register_forward_hook(lambda module, args, kwargs, y: y * 3, with_kwargs=True)
    loss = model(x).square().mean()
    handle.remove()
    return loss


def evaluated(model: Any, x: Tensor) -> Any:
    """The model is in another mode in backward."""
    model[1].function = lambda m, x: F.dropout(x, 0.5, training=m.training)
    loss = model(x).square().mean()
    model.eval()
    return loss


@pytest.mark.parametrize("rule", ["store: recompute", "store: exact\n    tile: 4"], ids=["recompute", "tile"])
@pytest.mark.parametrize("run", [through_list, through_object, hook_of_forward, evaluated])
@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_what_surrounds_a_call_is_that_of_the_first_run(rule: str, run: Callable[..., Any]) -> None:
    if run is evaluated and "tile" in rule:
        pytest.skip("slices have dropout masks of their own")
    torch.manual_seed(1)
    block = Block(lambda _, x: x)
    expected = converted(None, deepcopy(block), run)
    torch.testing.assert_close(converted(rule, deepcopy(block), run), expected, rtol=0, atol=0)


def test_outputs_are_recorded_once() -> None:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    model, ids = transformers.MixtralForCausalLM(config), torch.randint(0, 64, (8, 6))
    expected = model(input_ids=ids, labels=ids).loss
    rules = "on module:\n    by_name: model.layers.*.mlp\n    store: exact\n    tile: 4\n"
    mt.convert(model, policy_of(rules))
    notice._given.clear()
    with pytest.warns(UserWarning, match="hooks inside it would run once per slice"):
        output = model(input_ids=ids, labels=ids)
    assert len(output.router_logits) == 2
    torch.testing.assert_close(output.loss, expected)
    model(input_ids=ids, labels=ids, output_router_logits=False)
    assert has_slices(model.model.layers[0].mlp)


def test_what_runs_inside_a_module_that_runs_again_has_its_index() -> None:
    """Layers that hooks store are found in the first forward, although it saves nothing of them."""

    def scattered(m: Any, x: Tensor) -> Tensor:
        return x.index_add(0, torch.zeros(8, dtype=torch.int64), m.up(x)[..., :WIDTH])

    model = nn.Sequential(*[Block(scattered) for _ in range(3)])
    rules = "on other:\n    by_index: 0 2\n    by_name: 0.index_add.0 1.index_add.0\n    enable: False\n"
    mt.convert(model, policy_of(f"{rules}on module:\n    by_name: 1\n    store: recompute\n"))
    notice._given.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(torch.randn(8, 4, WIDTH)).square().mean().backward()
    found = conversion(model).catalog.layers()
    names = [f"{n}.index_add.0" for n in range(3)]
    assert [(index, name) for tag, index, name in sorted(found, key=str) if tag == "other"] == [
        *enumerate(names)
    ]


def test_a_trial_leaves_no_trace() -> None:
    start()
    block = Block(in_sequence, calls=[1], count=torch.zeros(()))
    before = random.getstate()
    with undone(block):
        block(torch.randn(2, WIDTH))
        in_tensor(block, torch.ones(()))
        random.random()
    assert (block.calls, float(block.count), random.getstate()) == ([1], 0.0, before)  # type: ignore[arg-type]
