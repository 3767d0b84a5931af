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
from mesa_tune.conversion.python_state.watch import Watch, undone
from mesa_tune.conversion.sliced import has_slices
from tests.builders import conversion, policy_of

RULES = "store: recompute", "store: exact\n    tile: 4"
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


def local_import(m: Any, x: Tensor) -> Any:
    import random as draw

    return x * draw.random()


def later(m: Any, x: Tensor) -> Any:
    """Begin to draw in the third call."""
    m.calls += 1
    return x * random.random() if m.calls > 2 else x


def drawn() -> int:
    return int(np.random.randint(8))


def noise(generator: Callable[[Any], torch.Generator]) -> Forward:
    return lambda m, x: x + torch.randn(WIDTH, generator=generator(m))


def around() -> Forward:
    calls, generator = 0, torch.Generator()

    def forward(m: Any, x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return x * 0.5**calls + torch.randn(WIDTH, generator=generator)

    return forward


def counted(m: Any, x: Tensor) -> Any:
    m.calls += 1  # a number, an array, or a tensor in place
    return x * 0.5 ** float(m.calls)


def in_mapping(m: Any, x: Tensor) -> Any:
    m.calls["x"] += 1
    return x * 0.5 ** m.calls["x"]


def in_sequence(m: Any, x: Tensor) -> Any:
    return x * 0.5 ** (m.calls.append(0) or len(m.calls))


def in_class(m: Any, x: Tensor) -> Any:
    Block.made += 1
    m.seen.append(0)
    return x * 0.5 ** (Block.made + len(m.seen))


def in_globals(m: Any, x: Tensor) -> Any:
    globals()["CALLS"] = CALLS + 1
    LOG.append(CALLS)
    return x * 0.5 ** (CALLS + len(LOG))


def penalized(m: Any, x: Tensor) -> Any:
    m.penalty = x.square().mean()
    return x


def recurrent(m: Any, x: Tensor) -> Any:
    """Add what the last step left, and leave something for the next one."""
    y = x + m.state
    m.state = x.detach().mean((0, 1))
    return y


def cached(m: Any, x: Tensor) -> Any:
    """Make a table once, and a mask, as large as a sample, in each call."""
    m.table = torch.linspace(0, 1, WIDTH) if m.table is None else m.table
    m.mask, m.width = torch.ones(x.shape[1:]).tril(), x.shape[-1]
    return x * m.table * m.mask


def asserted(m: Any, x: Tensor) -> Any:
    assert x.shape[0] == 8
    return x


class Case(NamedTuple):
    """A block; `cut`: it runs in slices. `again`: it runs again."""

    make: Callable[[], nn.Module]
    cut: bool = False
    again: bool = True


def case(function: Forward, **state: Any) -> Case:
    return Case(lambda: Block(function, **deepcopy(state)))


def hooked(hook: Callable[..., Any]) -> nn.Module:
    block = Block(lambda _, x: x)
    block.up.register_forward_hook(hook)
    return block


def counting_hook() -> nn.Module:
    calls: Any = []
    return hooked(lambda module, args, y: calls.append(0) or y * 0.5 ** len(calls))


def with_buffer() -> nn.Module:
    block = Block(counted)
    block.register_buffer("calls", torch.zeros(()))
    return block


CASES: dict[str, Case] = {
    "random": case(lambda m, x: x * random.random()),
    "from random": case(lambda m, x: x * uniform(0.5, 2)),
    "a local import": case(local_import),
    "random, later": case(later, calls=0),
    "numpy in a helper": case(lambda m, x: x.roll(drawn(), 0)),
    "random.Random": case(lambda m, x: x * m.rng.random(), rng=random.Random(1)),
    "numpy.Generator": case(lambda m, x: x * m.rng.random(), rng=np.random.default_rng(1)),
    "numpy.RandomState": case(lambda m, x: x * m.rng.rand(), rng=np.random.RandomState(1)),
    "torch.Generator": Case(lambda: Block(noise(lambda m: m.rng), rng=torch.Generator())),
    "one in a dict": Case(lambda: Block(noise(lambda m: m.rng["x"]), rng={"x": torch.Generator()})),
    "a global one": case(noise(lambda _: GENERATOR)),
    "variables around it": Case(lambda: Block(around())),
    "an int": case(counted, calls=0),
    "a dict": case(in_mapping, calls={"x": 0}),
    "a Counter": case(in_mapping, calls=Counter()),
    "a defaultdict": case(in_mapping, calls=defaultdict(int)),
    "a list": case(in_sequence, calls=[]),
    "a deque": case(in_sequence, calls=deque(maxlen=3)),
    "a set": case(lambda m, x: x * 0.5 ** (m.calls.add(len(m.calls)) or len(m.calls)), calls=set()),
    "an object": Case(lambda: Block(lambda m, x: counted(m.own, x), own=SimpleNamespace(calls=0))),
    "an array": case(counted, calls=np.zeros(())),
    "its class": case(in_class),
    "global variables": case(in_globals),
    "a buffer": Case(with_buffer),
    "a tensor in place": case(counted, calls=torch.zeros(())),
    "an iterator": Case(lambda: Block(lambda m, x: x / next(m.calls), calls=itertools.count(1)), again=False),
    "a penalty": case(penalized),
    "a list of penalties": case(lambda m, x: m.penalties.append(x.square().mean()) or x, penalties=[]),
    "state of the last step": case(recurrent, state=torch.zeros(WIDTH)),
    "a cache": Case(lambda: Block(cached, table=None), cut=True),
    "nothing": Case(lambda: Block(lambda m, x: x), cut=True),
    "an assertion": case(asserted),
    "a hook that counts": Case(counting_hook),
    "a hook": Case(lambda: hooked(lambda module, args, output: output * 2)),
    "in another": Case(lambda: nn.Sequential(Block(counted, calls=0), Block(later, calls=2))),
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
        return float(deepcopy(value).random())
    if isinstance(value, (list, deque)):
        return list(map(described, value))
    return {name: described(one) for name, one in value.items()} if isinstance(value, dict) else repr(value)


def losses(block: nn.Module) -> Tensor:
    """Penalties that the forward has left."""
    left = [getattr(block, "penalty", None), *getattr(block, "penalties", ())]
    return torch.stack([torch.zeros(()), *(each for each in left if each is not None)]).sum()


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
@pytest.mark.parametrize("rule", RULES, ids=["recompute", "tile"])
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


def converted(rule: str | None, block: Block, run: Callable[..., Any]) -> tuple[Tensor, Any]:
    """Return what `run` makes of the model and its input, and the gradient of a weight of the block."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), block)
    if rule is not None:
        mt.convert(model, policy_of(f"on module:\n    by_name: 1\n    {rule}\n"), min_elements=10**9)
    loss = run(model, torch.randn(8, 4, WIDTH))
    loss.backward()
    return loss.detach(), block.up.weight.grad


def with_argument(given: Any, use: Callable[[Any, Tensor], Any], loss: Callable[[Any], Any]) -> Any:
    """Call the block with an object of the caller, which it changes by `use`; `loss` is a function of it."""

    def run(model: Any, x: Tensor) -> Any:
        model[1].function, argument = lambda _, pair: use(pair[1], pair[0]), deepcopy(given)
        return model[1]((model[0](x), argument)).square().mean() + loss(argument)

    return run


def hook_of_forward(model: Any, x: Tensor) -> Any:
    """A hook is there in the forward alone."""
    handle = model[1].up.register_forward_hook(lambda module, args, kwargs, y: y * 3, with_kwargs=True)
    loss = model(x).square().mean()
    handle.remove()
    return loss


def evaluated(model: Any, x: Tensor) -> Any:
    """The model is in another mode in backward."""
    model[1].function = lambda m, x: x * (2 + m.training)
    loss = model(x).square().mean()
    model.eval()
    return loss


AROUND = {
    "a list": with_argument([], lambda given, x: given.append(x.square().mean()) or x, sum),
    "an object": with_argument(SimpleNamespace(calls=0), counted, lambda given: given.calls),
    "a hook of the forward": hook_of_forward,
    "another mode": evaluated,
}


@pytest.mark.parametrize("rule", RULES, ids=["recompute", "tile"])
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_what_surrounds_a_call_is_that_of_the_first_run(rule: str, name: str) -> None:
    run = AROUND[name]
    torch.manual_seed(1)
    block = Block(lambda _, x: x)
    expected = converted(None, deepcopy(block), run)
    torch.testing.assert_close(converted(rule, deepcopy(block), run), expected)


def test_outputs_are_recorded_once() -> None:
    sizes: Any = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads, output_router_logits=True)
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
    assert has_slices(model.get_submodule("model.layers.0.mlp"))


def test_what_runs_inside_a_module_that_runs_again_has_its_index() -> None:
    """Layers that hooks store are found in the first forward, although it saves nothing of them."""

    def scattered(m: Any, x: Tensor) -> Any:
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
    block: Any = Block(in_sequence, calls=[1], count=torch.zeros(()))
    before = random.getstate()
    with undone(Watch(block)):
        block(torch.randn(2, WIDTH) * random.random())
        block.count += 1
    assert block.calls == [1]
    assert block.count == 0
    assert random.getstate() == before


def test_a_hook_that_a_trial_registers_goes_with_the_attribute_that_says_so() -> None:
    seen: list[int] = []

    def hooked(m: Any, x: Tensor) -> Any:
        if not m.registered:
            m.registered = True
            m.up.register_forward_hook(lambda *_: seen.append(1))
        return x

    block: Any = Block(hooked, registered=False)
    with undone(Watch(block)):
        block(torch.randn(2, WIDTH))
    assert not block.registered
    assert not block.up._forward_hooks
    block(torch.randn(2, WIDTH))
    assert len(seen) == 1
