"""The parity cases of LoKr's ops."""

from __future__ import annotations

from functools import partial

from ..spec import Case, Sizes

DENSE = ("w1", "w2")
PAIR_W1 = ("w1_a", "w1_b", "w2")
PAIR_W2 = ("w1", "w2_a", "w2_b")
PAIRS = ("w1_a", "w1_b", "w2_a", "w2_b")
TUCKER = ("w1", "w2_a", "w2_b", "t2")
BASE = ("base",)
_few = partial(Case, mixes="few")
_gpu = partial(Case, mixes="few", device="cuda")

_SMALL: Sizes = {"a": 3, "b": 4, "c": 24, "d": 20, "k": ()}
_LOW: Sizes = {"a": 4, "b": 3, "c": 40, "d": 36, "k": (), "r": 4}
_LOW_BOTH: Sizes = {"a": 5, "b": 4, "c": 20, "d": 16, "k": (), "p": 3, "r": 4}

WEIGHT_CASES = (
    Case("plain", _SMALL, present=DENSE + BASE),
    _few("pairs", _LOW_BOTH, present=PAIRS + BASE),
    _few("low-rank w2", _LOW, present=PAIR_W2),
    _few("conv", {"a": 3, "b": 2, "c": 12, "d": 6, "k": (3, 3)}, present=DENSE),
    _few("conv pair", {"a": 3, "b": 2, "c": 13, "d": 7, "k": (3,), "r": 3}, present=PAIR_W2),
    _few("tucker", {"a": 2, "b": 3, "c": 12, "d": 10, "k": (3, 3), "r": 3}, present=TUCKER),
    _few("primes", {"a": 1, "b": 7, "c": 53, "d": 11, "k": ()}, present=DENSE),
    _few("large w1", {"a": 11, "b": 13, "c": 3, "d": 5, "k": ()}, present=DENSE),
    _few("rank 130", {"a": 1, "b": 2, "c": 40, "d": 36, "k": (), "r": 130}, present=PAIR_W2),
    _few("integers", _SMALL, "integers", 2.0, DENSE + BASE, exact=True),
    _few("one nonzero", _SMALL, "one_hot", present=DENSE),
    _few("cancellation", _LOW_BOTH, "cancellation", present=PAIRS),
    _few("subnormal", _SMALL, "subnormal", present=DENSE),
    _few("near overflow", _LOW, "near_overflow", 0.0055, PAIR_W2),
    _few("zero factor", _LOW, "zero_factor", present=PAIR_W2),
    _few("large delta", _SMALL, "large", present=DENSE + BASE),
    _few("strided", _SMALL, layout="strided", present=DENSE + BASE),
    _gpu("llm", {"a": 8, "b": 8, "c": 512, "d": 512, "k": (), "r": 16}, present=PAIR_W2),
    _gpu("llm dense", {"a": 64, "b": 64, "c": 64, "d": 64, "k": ()}, present=DENSE + BASE),
    _gpu(
        "gpu conv",
        {"a": 8, "b": 8, "c": 160, "d": 80, "k": (3, 3), "p": 4, "r": 16},
        present=PAIRS + BASE,
    ),
    _gpu("gpu ragged", {"a": 1, "b": 5, "c": 3073, "d": 613, "k": ()}, present=DENSE),
)

_TOKENS: Sizes = {"T": (2, 32), "a": 8, "b": 7, "c": 12, "d": 16}
_RANK: Sizes = {"T": (2, 20), "a": 8, "b": 7, "c": 24, "d": 40, "r": 4}
_RANKS: Sizes = {"T": 37, "a": 9, "b": 8, "c": 24, "d": 16, "p": 6, "r": 5}

APPLY_CASES = (
    Case("plain", _TOKENS, present=DENSE + BASE),
    _few("low-rank w2", _RANK, present=PAIR_W2 + BASE),
    _few("pairs", _RANKS, present=PAIRS),
    _few("low-rank w1", {"T": 41, "a": 5, "b": 7, "c": 13, "d": 11, "p": 3}, present=PAIR_W1),
    _few("w2 first", {"T": 19, "a": 7, "b": 5, "c": 31, "d": 70}, present=DENSE + BASE),
    _few("w1 first", {"T": 19, "a": 3, "b": 6, "c": 23, "d": 70}, present=DENSE + BASE),
    _few("whole steps", {"T": 19, "a": 3, "b": 6, "c": 23, "d": 96}, present=DENSE),
    _few("large w1", {"T": 5, "a": 70, "b": 67, "c": 3, "d": 5}, present=DENSE),
    _few("tucker", {"T": 17, "a": 2, "b": 3, "c": 12, "d": 10, "r": 3}, present=TUCKER),
    _few("one token", {"T": (), "a": 4, "b": 3, "c": 12, "d": 16}, present=DENSE),
    _few("no tokens", {"T": (3, 0), "a": 4, "b": 3, "c": 12, "d": 16}, present=DENSE + BASE),
    _few("two levels", {"T": 601, "a": 1, "b": 2, "c": 5, "d": 7}, present=DENSE),
    _few("integers", _TOKENS, "integers", 2.0, DENSE + BASE),
    _few("integers by rank", _RANK, "integers", 2.0, PAIR_W2),
    _few("one nonzero", {"T": 9, "a": 29, "b": 3, "c": 31, "d": 5}, "one_hot", present=DENSE),
    _few("cancellation", _RANKS, "cancellation", present=PAIRS),
    _few("subnormal", _TOKENS, "subnormal", present=DENSE),
    _few("near overflow", _RANK, "near_overflow", 0.0055, PAIR_W2),
    _few("zero factor", _TOKENS, "zero_factor", present=DENSE + BASE),
    _few("strided", _TOKENS, layout="strided", present=DENSE + BASE),
    _gpu("llm", {"T": 8192, "a": 8, "b": 8, "c": 512, "d": 512, "r": 16}, present=PAIR_W2),
    _gpu("llm dense", {"T": 8192, "a": 64, "b": 64, "c": 64, "d": 64}, present=DENSE + BASE),
    _gpu("llm factor 8", {"T": 4096, "a": 8, "b": 8, "c": 512, "d": 512}, present=DENSE),
    _gpu(
        "gpu ragged",
        {"T": 1021, "a": 5, "b": 7, "c": 613, "d": 307, "p": 3, "r": 13},
        present=PAIRS + BASE,
    ),
)
