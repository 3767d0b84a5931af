"""The profile of a workload's bytes, from fake tensors: no model is allocated, and no step runs.

What is hard: it must be the profile that real steps would give. So the same steps are traced by the same
code; only the tensors have no memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from mesa_tune.measure.cuda.cuda_model import cuda_functions, update_all_at_once
from mesa_tune.measure.draws import longest_batch
from mesa_tune.measure.tracing import StepTracer, TracedWorkload
from mesa_tune.profiles.profile import Profile
from mesa_tune.workload.fake import FakeWorkload
from mesa_tune.workload.workload import Workload

UNVERIFIED = "bytes on cuda are a model that few GPUs have checked: --fits leaves room"


def bytes_only_profile(workload: Workload, *, cuda: bool = False) -> Profile:
    """Return the profile of `workload` without prices: bytes, lifetimes and peak, under any policy.

    Its layers have no options, and `step_ms` is None. With `cuda`, it is a model of the step on CUDA. Raise
    WorkloadError for a workload whose functions raise, or read the values of tensors.
    """
    fake = FakeWorkload.of(workload)
    with fake.faking(), cuda_functions() if cuda else nullcontext():
        model = fake.build()
        optimizer = fake.make_optimizer(model)
        if cuda:
            update_all_at_once(optimizer)
        longest = longest_batch(fake)
        fake.take_step(model, longest.batch, optimizer)
        tracer = StepTracer(fake, model, optimizer, model.zero_grad)
        traced = TracedWorkload(tracer, longest, variants=False)  # no search chooses among them
        profile = replace(traced.profile(None), partial=False)
    return replace(profile, device="cuda", notes=(UNVERIFIED, *profile.notes)) if cuda else profile
