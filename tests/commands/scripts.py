"""Training scripts, and a stand-in for `subprocess.Popen` that runs them in this process."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest
from torch.nn.modules import module as hooks

import mesa_tune as mt
from mesa_tune.measure.watching import bootstrap
from mesa_tune.measure.watching.watcher import Watcher
from tests.conftest import forget_accelerators

ROOT = Path(__file__).parents[2]

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput as Output

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 2)
        self.query, self.value = nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        logits = self.head((x + self.value(F.gelu(self.query(self.norm(x))))).mean(1))
        return Output(loss=F.cross_entropy(logits, labels), logits=logits)

def model(): return Net()
def batch(n): return {"input_ids": torch.randint(50, (n, 16)), "labels": torch.randint(2, (n,))}
def loss(model, batch): return model(**batch).loss
BATCH_SIZE = 8
"""

BERT = (
    MODEL
    + """
from transformers import BertConfig, BertForSequenceClassification
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
def model(): return BertForSequenceClassification(BertConfig(vocab_size=50, **SIZES))
"""
)

START = """
import sys, torch
from model import batch, model
torch.manual_seed(0)
net = model()
"""
END = """
print("done", sum(p.double().sum() for p in net.parameters()).item().hex(), torch.rand(1).item().hex())
"""

SCRIPTS = {
    "loop": """
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    given = batch(8)
    loss = net(**given).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "Trainer": """
from transformers import Trainer, TrainingArguments
data = [{name: tensor[0] for name, tensor in batch(1).items()} for _ in range(32)]
options = {"per_device_train_batch_size": 8, "max_steps": 4, "use_cpu": True, "report_to": []}
arguments = TrainingArguments(output_dir="out", save_strategy="no", disable_tqdm=True, **options)
Trainer(net, arguments, train_dataset=data).train()
""",
    "Lightning": """
import lightning
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, _): return self.net(**batch).loss
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
data = [{name: tensor[0] for name, tensor in batch(1).items()} for _ in range(32)]
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **options)
trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=8))
""",
}


def rows(profile: mt.Profile) -> list[tuple[str, str, int, int]]:
    """Name, tag, index and bytes of each layer."""
    return [(layer.name, layer.tag, layer.index, layer.own_bytes) for layer in profile.layers]


def plain_profile(path: Path) -> mt.Profile:
    """The profile of `MODEL` in a new file, in bytes alone."""
    path.write_text(MODEL)
    return mt.profile(mt.Workload.load(path, device="cpu"), options=[])


def last_lines(text: str) -> list[str]:
    """Lines that `END` prints: sums of weights, and a random number."""
    return [line for line in text.splitlines() if line.startswith("done")]


class InThisProcess:
    """A Python script instead of a process: `wait` runs it in a thread, which has its own stack."""

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: int | None) -> None:
        assert command[0] == sys.executable
        self.arguments, self.folder = command[1:], Path(env["PYTHONPATH"].split(os.pathsep)[0])
        self.status: int | None = None

    def wait(self, seconds: float | None = None) -> int:
        """The script's exit status."""
        if self.status is None:
            thread = Thread(target=self._run)
            thread.start()
            thread.join()
        assert self.status is not None
        return self.status

    def terminate(self) -> None:
        """Nothing is left to be ended."""

    def _run(self) -> None:
        before = set(hooks._global_forward_pre_hooks)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(bootstrap, "FOLDER", self.folder)
            watchers = watchers_instead_of_atexit(patched)
            bootstrap.wait_for_forward()
            main = ModuleType("__main__")
            patched.setitem(sys.modules, "__main__", main)
            self.status = run_script(self.arguments, main, patched)
            for watcher in watchers:
                if not watcher.ended:
                    watcher.at_exit()
                watcher.optimizer_hook.remove()
        sys.modules.pop("model", None)
        for number in set(hooks._global_forward_pre_hooks) - before:
            del hooks._global_forward_pre_hooks[number]


def watchers_instead_of_atexit(patched: pytest.MonkeyPatch) -> list[Watcher]:
    """The list to which watchers are added that would run when Python ends."""
    watchers: list[Watcher] = []
    register: Callable[..., Any] = atexit.register

    def note(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if not isinstance(owner, Watcher):
            return register(function, *args, **kwargs)
        watchers.append(owner)
        return function

    patched.setattr(atexit, "register", note)
    return watchers


def run_script(arguments: list[str], main: ModuleType, patched: pytest.MonkeyPatch) -> int:
    """Exit status of the script in the current folder, as `python ARGUMENTS` would have it."""
    forget_accelerators()
    path = Path(arguments[0]).resolve()
    patched.setattr(sys, "argv", arguments)
    patched.syspath_prepend(str(path.parent))
    sys.modules.pop("model", None)
    vars(main)["__file__"] = str(path)
    try:
        exec(compile(path.read_text("utf-8"), str(path), "exec"), vars(main))
    except Exception:  # noqa: BLE001 - a script may raise anything
        traceback.print_exc()
        return 1
    return 0


def run_plainly(name: str = "train.py") -> None:
    """Run the script without `mesa-tune profile`."""
    with pytest.MonkeyPatch.context() as patched:
        main = ModuleType("__main__")
        patched.setitem(sys.modules, "__main__", main)
        thread = Thread(target=partial(run_script, [name], main, patched))
        thread.start()
        thread.join()
