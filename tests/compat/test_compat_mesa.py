"""Mesa's users: a vision transformer with `ms.MatMul` and `ms.Softmax`, and a policy deployed on it."""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
import mesa_tune.compat.mesa as ms
from mesa_tune import notice
from tests.builders import cross_entropy, descend
from tests.compat_measures import error, gradient, saved_bytes
from tests.step_memory import Composed

WIDTH, HEADS = 48, 3
POLICY = "on fc conv layernorm gelu softmax matmul:\n  by_index: all\n  enable: True\n  ema_decay: 0.9\n"
Batch = tuple[Tensor, Tensor]


def attention() -> nn.Module:
    """As Mesa's README writes it: products and softmax as layers."""

    def forward(m: Any, x: Tensor) -> Any:
        q, k, v = m.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = m.mm1(q, k.transpose(-2, -1)) / math.sqrt(WIDTH // HEADS)
        return m.proj(m.mm2(m.softmax(scores), v).transpose(1, 2).flatten(2))

    linear = {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "proj": nn.Linear(WIDTH, WIDTH)}
    products = {name: ms.MatMul(quant_groups=HEADS) for name in ("mm1", "mm2")}
    return Composed(forward, **linear, **products, softmax=ms.Softmax(dim=-1, quant_groups=HEADS))


def block() -> nn.Module:
    """A transformer block with `attention`."""

    def forward(m: Any, x: Tensor) -> Any:
        x = x + m.attn(m.norm1(x))
        return x + m.mlp(m.norm2(x))

    norms = {name: nn.LayerNorm(WIDTH, eps=1e-3) for name in ("norm1", "norm2")}
    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return Composed(forward, **norms, attn=attention(), mlp=mlp)


@pytest.fixture
def vit() -> nn.Module:
    """Images to logits, through two blocks."""

    def forward(m: Any, images: Tensor) -> Any:
        return m.head(m.blocks(m.patches(images).flatten(2).transpose(1, 2)).mean(1))

    torch.manual_seed(0)
    patches, blocks = nn.Conv2d(3, WIDTH, 4, stride=4), nn.Sequential(block(), block())
    return Composed(forward, patches=patches, blocks=blocks, head=nn.Linear(WIDTH, 10))


@pytest.fixture
def batch() -> Batch:
    torch.manual_seed(1)
    return torch.randn(16, 3, 24, 24), torch.randint(0, 10, (16,))


def write_policy(folder: Path, level: int = 256, more: str = "") -> Path:
    path = folder / "policy.txt"
    path.write_text(f"{POLICY}  level: {level}\n{more}")
    return path


def deployed(model: nn.Module, path: Path) -> nn.Module:
    ms.policy.convert_by_num_groups(model, 3)
    ms.policy.deploy_on_init(model, path, verbose=str, override_verbose=True)
    return model


@pytest.mark.parametrize(("level", "share", "most"), [(256, 0.29, 1e-3), (16, 0.16, 0.2), (4, 0.1, 3)])
def test_training(vit: Any, batch: Batch, tmp_path: Path, level: int, share: float, most: float) -> None:
    plain = copy.deepcopy(vit)
    model = deployed(vit, write_policy(tmp_path, level))
    ours, exact = (partial(cross_entropy, net, batch) for net in (model, plain))
    first = ours()
    assert torch.equal(first, exact())
    assert saved_bytes(model, ours) < share * saved_bytes(plain, exact)
    assert 0 < error(gradient(model, ours), gradient(plain, exact)) < most
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    descend(optimizer, ours, 10)
    assert ours() < first


def test_evaluation_keeps_everything(vit: Any, batch: Batch, tmp_path: Path) -> None:
    plain = copy.deepcopy(vit).eval()
    model = deployed(vit, write_policy(tmp_path)).eval()
    exact = gradient(plain, lambda: plain(batch[0]).sum())
    assert torch.equal(gradient(model, lambda: model(batch[0]).sum()), exact)


def test_state_dict_has_mesas_entries(vit: Any) -> None:
    before = vit.state_dict()
    ms.policy.convert_by_num_groups(vit, 3)
    found = {key: tuple(value.shape) for key, value in vit.state_dict().items()}
    for name in ("patches", "blocks.0.norm1", "blocks.0.mlp.1", "blocks.1.attn.mm1.quant1", "head"):
        assert found[f"{name}.clip_val"] == found[f"{name}.shift"] == (3,)
        assert found[f"{name}.iteration"] == (1,)
    assert all(torch.equal(vit.state_dict()[key], value) for key, value in before.items())
    assert {name for name, _ in vit.named_parameters()} == {key for key in before if "quant" not in key} - {
        f"blocks.{n}.attn.softmax.{key}" for n in (0, 1) for key in ("clip_val", "shift", "iteration")
    }


def test_a_checkpoint_of_mesa_goes_on(vit: Any, batch: Batch, tmp_path: Path) -> None:
    model = deployed(vit, write_policy(tmp_path))
    checkpoint = {key: value + 0.5 for key, value in model.state_dict().items()}
    iterations = {key: value * 0 + 7 for key, value in checkpoint.items() if key.endswith("iteration")}
    model.load_state_dict(checkpoint | iterations, strict=True)
    widths = model.get_buffer("head.clip_val").clone()
    model(batch[0]).sum().backward()
    assert model.get_buffer("head.iteration") == 8
    # The ranges moved a tenth of the way to this step's, as Mesa's do.
    inputs: list[Tensor] = []
    model.get_submodule("head").register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    model.eval()(batch[0])
    groups = inputs[0].view(16, 3, -1).transpose(0, 1).flatten(1)
    own = groups.amax(1) - groups.amin(1)
    torch.testing.assert_close(model.get_buffer("head.clip_val"), 0.9 * widths + 0.1 * own)


def test_ranges_move_with_a_copy(vit: Any, batch: Batch, tmp_path: Path) -> None:
    model = deployed(vit, write_policy(tmp_path))
    other = copy.deepcopy(model)
    other(batch[0]).sum().backward()
    assert other.get_buffer("head.iteration") == 1
    assert model.get_buffer("head.iteration") == 0


def test_conversion_keeps_weights_eps_hooks_and_mode(vit: Any) -> None:
    weight, calls = vit.head.weight, []
    handle = vit.head.register_forward_hook(lambda *_: calls.append(1))
    vit.blocks[0].eval()
    ms.policy.convert_by_num_groups(vit, 3)
    block = vit.blocks[0]
    assert isinstance(block.norm1, ms.LayerNorm)
    assert (block.norm1.eps, block.norm1.training, vit.head.training) == (1e-3, False, True)
    assert vit.head.weight is weight
    vit(torch.randn(1, 3, 24, 24))
    handle.remove()
    vit(torch.randn(1, 3, 24, 24))
    assert calls == [1]


def test_group_sizes_and_what_stays(vit: Any) -> None:
    with pytest.warns(UserWarning, match=r"'blocks\.0\.mlp\.1 \(GELU\)'"):
        ms.policy.convert_by_group_size(vit, 16)
    assert isinstance(vit.blocks[0].mlp[2], ms.Linear)
    assert (vit.blocks[0].mlp[2].quant_groups, vit.patches.quant_groups) == (4 * WIDTH // 16, 1)
    with pytest.warns(UserWarning, match="'0' gets 2 groups: 3 do not divide its 64 channels"):
        ms.policy.convert_by_num_groups(nn.Sequential(nn.Linear(64, 8)), 3)


def test_rules_bind_by_index_and_leave_alone_what_they_do_not_name(vit: Any, tmp_path: Path) -> None:
    more = "\non gelu:\n  by_index: all\n  enable: True\n  level: 256\n\n  by_index: 1\n  enable: False\n"
    model = deployed(vit, write_policy(tmp_path, more=more))
    first, second = (block.mlp[1] for block in vit.blocks)
    assert {type(first), type(second)} == {ms.GELU}
    assert (first.enable, second.enable) == (True, False)
    assert (first.index, second.index, first.quant_groups, first.ema_decay) == (0, 1, 3, 0.9)
    softmax: Any = model.get_submodule("blocks.1.attn.softmax")
    assert (softmax.index, softmax.quant_groups) == (1, HEADS)
    assert model.get_submodule("blocks.1.attn.mm2").index == 3  # two a block


def test_a_policy_of_ours_is_deployed_too(vit: Any, tmp_path: Path) -> None:
    path = tmp_path / "ours.txt"
    text = "# mesa-tune policy 1\non fc:\n  by_index: all\n  level: 16\n\n  by_name: head\n  enable: False\n"
    path.write_text(text)
    deployed(vit, path)
    assert vit.blocks[0].attn.qkv.layer_settings() == mt.LayerSettings(level=16)
    assert not vit.head.enable


def test_epoch_triggers(vit: Any, tmp_path: Path) -> None:
    more = "\non epoch: 0 10\n  by_index: all\n  by_tag: fc\n  level: 16\n"
    path = write_policy(tmp_path, more=more)
    deployed(vit, path)
    policies = ms.policy.read_policy(path, "epoch")
    assert policies[0]["trigger"] == [0, 10]
    assert policies[1] == {"by_index": "all", "by_tag": "fc", "level": "16"}
    ms.policy.deploy_on_epoch(vit, policies, 9, verbose=str)
    assert vit.head.level == 256
    ms.policy.deploy_on_epoch(vit, policies, 10, verbose=str)
    assert (vit.head.level, vit.patches.level) == (16, 256)
    ms.policy.deploy_on_iteration(vit, [policies[0], {"by_index": ["0"], "enable": "false"}], 0, verbose=str)
    assert (vit.patches.enable, vit.head.enable) == (False, True)


def test_triggers_of_a_tags_section_bind_that_tag(vit: Any, tmp_path: Path) -> None:
    path = tmp_path / "policy.txt"
    path.write_text("on fc: 3\n  by_index: all\n  enable: True\n  level: 4\n")
    deployed(vit, path)
    ms.policy.deploy_on_epoch(vit, ms.policy.read_policy(path, "fc"), 3, verbose=str)
    assert (vit.head.enable, vit.head.level, vit.patches.enable) == (True, 4, False)


def test_bad_policies(vit: Any, tmp_path: Path) -> None:
    path = tmp_path / "policy.txt"
    with pytest.raises(mt.PolicyError):
        ms.policy.deploy_on_init(vit, path)
    path.write_text("on fc:\n  by_index: all\n  levle: 16\n")
    with pytest.raises(mt.PolicyError, match="did you mean 'level'"):
        deployed(vit, path)


def test_bad_rules_given_as_dicts(vit: Any) -> None:
    ms.policy.convert_by_num_groups(vit, 3)
    with pytest.raises(mt.PolicyError, match="unknown key 'levels'"):
        vit.head.update_quantization_parameter(by_index="all", levels=3)
    with pytest.raises(mt.PolicyError, match="bad value '1' for level"):
        vit.head.update_quantization_parameter(by_index="all", level="1")
    with pytest.raises(mt.PolicyError, match="no trigger"):
        ms.policy.deploy_on_epoch(vit, [{"by_index": "all"}], 0)


def test_warnings_name_what_means_nothing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"ms\.Linear: 'args' means nothing"):
        ms.Linear(4, 4, args=object())
    with pytest.warns(UserWarning, match="no layer of Mesa's: convert_by_num_groups makes them"):
        ms.policy.deploy_on_init(nn.Linear(2, 2), write_policy(tmp_path), verbose=str)
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="5"):
        deployed(model, write_policy(tmp_path, more="\non fc:\n  by_index: 5\n  enable: True\n"))


def test_without_a_policy_layers_are_numbered_and_a_warning_says_so(
    vit: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mesa's programs have `--ms_policy ''` by default."""
    monkeypatch.setattr(notice, "_given", set())
    plain = copy.deepcopy(vit)
    ms.policy.convert_by_num_groups(vit, 3)
    with pytest.warns(UserWarning, match=r"no policy file is given \(''\)"):
        ms.policy.deploy_on_init(vit, "", verbose=str)
    assert (vit.head.index, vit.head.enable) == (8, False)
    assert ms.policy.read_policy("", "epoch") == []
    exact = gradient(plain, lambda: plain(batch[0]).square().sum())  # nothing is compressed
    assert torch.equal(gradient(vit, lambda: vit(batch[0]).square().sum()), exact)


def test_modules_of_mesa_that_are_not_here_say_why() -> None:
    with pytest.raises(AttributeError, match=r"mesa\.custom_quant: not supported: .*mesa_tune\.ops"):
        _ = ms.custom_quant


def test_operands_have_their_own_ranges() -> None:
    for wants in ((True, True), (True, False), (False, True)):
        layer, a, b = ms.MatMul(mesa=True), 3 * torch.rand(8, 8), 50 * torch.rand(8, 8)
        layer(a.requires_grad_(wants[0]), b.requires_grad_(wants[1]))
        # What is kept of one operand is for the other's gradient.
        assert [int(operand.iteration) for operand in layer.operands] == [int(wants[1]), int(wants[0])]
        assert not wants[1] or layer.quant1.clip_val < 3
        assert not wants[0] or layer.quant2.clip_val > 3


def test_operands_stored_apart_are_refused() -> None:
    layer = ms.MatMul(mesa=True)
    layer.quant2.level = 16
    with pytest.raises(ValueError, match="stores both operands alike"):
        layer(torch.randn(4, 4, requires_grad=True), torch.randn(4, 4))


def test_batchnorm_and_relu_by_themselves() -> None:
    layers = nn.Sequential(ms.Conv2d(4, 8, 3, mesa=True), ms.BatchNorm2d(8, mesa=True), ms.ReLU(mesa=True))
    twins = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    twins.load_state_dict(layers.state_dict(), strict=False)
    x = torch.randn(4, 4, 9, 9)
    assert torch.equal(layers(x), twins(x))
    exact = gradient(twins, lambda: twins(x).square().sum())
    assert error(gradient(layers, lambda: layers(x).square().sum()), exact) < 1e-3


def test_a_layer_that_runs_twice_before_backward_has_both_ranges() -> None:
    layer, plain = ms.Linear(32, 8, mesa=True), nn.Linear(32, 8)
    plain.load_state_dict(layer.state_dict(), strict=False)
    layer.ema_decay = 0.0
    small, large = torch.rand(40, 32), 100 * torch.rand(40, 32)
    exact = gradient(plain, lambda: plain(small).sum() + plain(large).sum())
    assert error(gradient(layer, lambda: layer(small).sum() + layer(large).sum()), exact) < 1e-3
