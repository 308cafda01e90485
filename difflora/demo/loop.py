"""The optimisation loop that every training stage shares."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

WARMUP = 0.03  # share of the run over which the learning rate rises
GRAD_NORM = 1.0
WAIT_EVERY = 25  # steps between waits for the device, so that the time limit counts work done, not work queued
REPORTS = 10


@dataclass(frozen=True)
class Loop:
    """How to optimise: at most `steps` of AdamW and at most `seconds`, at a peak rate, on `device`."""

    steps: int
    rate: float
    device: str
    say: Callable[[str], None]
    average: float = 0.0  # decay of the running mean of the weights that replaces them at the end; 0 keeps the last
    seconds: float = math.inf

    @property
    def cuda(self) -> bool:
        """Whether the work runs on a CUDA device."""
        return torch.device(self.device).type == "cuda"


@dataclass(frozen=True)
class Variant:
    """One form of a stage's loss, of fixed tensor shapes, and the share of the steps that use it."""

    share: float
    loss: Callable[[], torch.Tensor]


def autocast(device: str) -> torch.autocast:
    """bfloat16 arithmetic on CUDA, plain float32 elsewhere."""
    kind = torch.device(device).type
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")


def rate_at(done: float) -> float:
    """The factor on the peak rate when a share `done` of the run is over: a linear rise, then a straight fall."""
    return max(0.0, min((done + 1e-3) / WARMUP, (1.0 - done) / (1.0 - WARMUP)))


def optimise(label: str, loop: Loop, weights: Iterable[torch.nn.Parameter], variants: Sequence[Variant]) -> None:
    """Train `weights` in place; every step lowers one of the variants' losses."""
    trained = list(weights)
    means = [weight.detach().clone() for weight in trained]
    backwards = [_backward(loop, trained, variant.loss) for variant in variants]
    shares = torch.tensor([variant.share for variant in variants])
    chooser = torch.optim.AdamW(trained, lr=loop.rate, betas=(0.9, 0.98), weight_decay=1e-3, fused=loop.cuda)
    picks = torch.multinomial(shares, loop.steps, replacement=True).tolist()
    started, done, reported = time.monotonic(), 0.0, 0
    for step, pick in enumerate(picks, start=1):
        for group in chooser.param_groups:
            group["lr"] = loop.rate * rate_at(done)
        value = backwards[pick]()
        torch.nn.utils.clip_grad_norm_(trained, GRAD_NORM)
        chooser.step()
        chooser.zero_grad()
        if loop.average:
            torch._foreach_lerp_(means, [weight.detach() for weight in trained], 1.0 - loop.average)
        if loop.cuda and step % WAIT_EVERY == 0:
            torch.cuda.synchronize()
        spent = time.monotonic() - started
        done = max(step / loop.steps, spent / loop.seconds)
        if int(done * REPORTS) > reported:
            reported = int(done * REPORTS)
            loop.say(f"{label}: step {step}, {spent:.0f} s, loss {value.item():.4f}")
        if done >= 1.0:
            break
    if loop.average:
        with torch.no_grad():
            for weight, mean in zip(trained, means, strict=True):
                weight.copy_(mean)


def _backward(
    loop: Loop, weights: list[torch.nn.Parameter], loss: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """A function that fills the weights' gradients and returns the loss: recorded once where CUDA allows that."""

    def eager() -> torch.Tensor:
        with autocast(loop.device):
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    if not loop.cuda:
        return eager
    try:
        return _recorded(weights, eager)
    except RuntimeError as error:
        loop.say(f"not recorded, runs step by step: {error}")
        torch.cuda.synchronize()
        return eager


def _recorded(weights: list[torch.nn.Parameter], eager: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`eager` as a CUDA graph.  The models are so small that launching their kernels one by one takes most time."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            eager()
    torch.cuda.current_stream().wait_stream(side)
    for weight in weights:
        weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = eager()
    gradients = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None

    def replay() -> torch.Tensor:
        graph.replay()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        return value

    return replay
