"""How long does `mt.auto` take in a script, and how long when its plan is there already?

    python benchmarks/auto.py [--models gpt2,llama] [--budget 60%] [--fast]

A GPT-2 of 4 layers and 256 channels with 50,257 words, and a Llama of 4 layers and 512 channels whose
attention has PEFT's LoRA adapters; 8 texts of 128 random tokens. Without a study (`trials=0`). Every call is
in a process of its own; its time begins when model, loader and optimizer exist. The loss must be bitwise that
of before. Results are appended to `results/auto.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from common import append
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mesa_tune as mt

LENGTH, BATCH, TEXTS, RANK = 128, 8, 400, 8


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, n_positions=LENGTH)
    )


def llama() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 1376,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8192, **sizes))
    lora = peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, lora)


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def timed(name: str, budget: str, run: str, fast: bool) -> dict[str, Any]:
    """Call `mt.auto` once; return its seconds."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    ids = torch.randint(model.config.vocab_size, (TEXTS, LENGTH))
    texts: Any = [{"input_ids": each, "labels": each} for each in ids]
    loader = DataLoader(texts, BATCH, shuffle=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = next(iter(loader))

    def value() -> float:
        torch.manual_seed(1)
        return loss(model, batch).item()

    before, wall, processor = value(), time.perf_counter(), time.process_time()
    mt.auto(model, loader, loss, budget=budget, optimizer=optimizer, run=run, trials=0, fast=fast)
    seconds = {"wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - processor}
    if value() != before:
        raise SystemExit(f"{name}: the loss is not bitwise that of before")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        print(json.dumps(timed(arguments.models, arguments.budget, arguments.run, arguments.fast)))
        return
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as run:
            asked = ["--budget", arguments.budget, *["--fast"] * arguments.fast]
            command = [sys.executable, __file__, "--models", name, "--run", run, *asked]
            first, second = (
                json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                for _ in range(2)
            )
        append(
            "auto",
            {
                "model": name,
                "budget": arguments.budget,
                "fast": arguments.fast,
                "first": first,
                "second": second,
            },
        )
        print(f"{name}: {first['wall_s']:.0f} s, again {second['wall_s']:.2f} s", flush=True)


if __name__ == "__main__":
    main()
