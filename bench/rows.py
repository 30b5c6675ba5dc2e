"""Rows of single ops beside those of the layers in ``shapes.py``: the matrix's set ``own``.

Op -> (case, mix); the mix is the row's own. Where two rows differ in what the case's name does not
say, the name must: a row is known by it.
"""

from __future__ import annotations

import torch

from lycoris.kernels.report import Mix
from lycoris.kernels.spec import Case

B16, F32 = torch.bfloat16, torch.float32


def lokr_sizes(a: int, b: int, c: int, d: int, rank: int) -> dict[str, int | tuple[int, ...]]:
    """Sizes of both halves, w2 factored where there is a rank."""
    return {"a": a, "b": b, "c": c, "d": d, "k": ()} | ({"r": rank} if rank else {})


SHAPES: dict[str, list[tuple[Case, Mix]]] = {
    "lora_apply": [
        (Case(f"{t}x{i}x{o} r={r}", {"T": t, "I": i, "O": o, "r": r}, present=p), mix)
        for t, i, o, r, p, mix in [
            (8192, 4096, 4096, 16, (), (B16, B16)),
            (8192, 4096, 4096, 16, ("base",), (B16, B16)),
            (8192, 4096, 4096, 128, (), (B16, B16)),
            (8192, 4096, 4096, 16, (), (B16, F32)),
            (8192, 4096, 4096, 16, (), (F32, F32)),
            (4096, 4096, 11008, 16, (), (B16, B16)),
            (77, 1280, 1280, 4, (), (B16, B16)),
        ]
    ],
    "lora_weight": [
        (Case(f"{o}x{n} r={r}", {"O": o, "N": n, "r": r}, present=p), mix)
        for o, n, r, p, mix in [
            (4096, 4096, 16, (), (B16, B16)),
            (4096, 4096, 16, ("base",), (B16, B16)),
            (4096, 4096, 16, (), (F32, F32)),
            (1280, 1280, 4, (), (B16, B16)),
        ]
    ],
    "loha_weight": [
        (Case(f"{o}x{n} r={r}", {"O": o, "N": n, "r": r}, present=p), mix)
        for o, n, r, p, mix in [
            (4096, 4096, 16, (), (B16, B16)),
            (4096, 4096, 16, ("base",), (B16, B16)),
            (4096, 4096, 64, (), (B16, B16)),
            (4096, 4096, 16, (), (F32, F32)),
            (12288, 3072, 16, (), (B16, B16)),
            (1280, 1280, 8, (), (B16, B16)),
        ]
    ],
    "loha_apply": [
        (Case(f"{t}x{i}x{o} r={r}", {"T": t, "I": i, "O": o, "r": r}, present=p), mix)
        for t, i, o, r, p, mix in [
            (8192, 4096, 4096, 16, (), (B16, B16)),
            (8192, 4096, 4096, 16, ("base",), (B16, B16)),
            (8192, 4096, 4096, 4, (), (B16, B16)),
            (8192, 4096, 4096, 32, (), (B16, B16)),
            (4096, 3072, 12288, 16, (), (B16, B16)),
            (77, 1280, 1280, 4, (), (B16, B16)),
        ]
    ],
    "lokr_weight": [
        (Case(f"({a}x{b}) x ({c}x{d}) r={r}", lokr_sizes(a, b, c, d, r), present=p), mix)
        for a, b, c, d, r, p, mix in [
            (8, 8, 512, 512, 16, ("w1", "w2_a", "w2_b"), (B16, B16)),
            (8, 8, 512, 512, 16, ("w1", "w2_a", "w2_b", "base"), (B16, B16)),
            (64, 64, 64, 64, 0, ("w1", "w2"), (B16, B16)),
            (8, 8, 512, 512, 16, ("w1", "w2_a", "w2_b"), (F32, F32)),
            (32, 32, 40, 40, 0, ("w1", "w2"), (B16, B16)),
        ]
    ],
    "lokr_apply": [
        (
            Case(
                f"{t} tokens, ({a}x{b}) x ({c}x{d}) r={r}",
                {k: n for k, n in (lokr_sizes(a, b, c, d, r) | {"T": t}).items() if k != "k"},
                present=p,
            ),
            mix,
        )
        for t, a, b, c, d, r, p, mix in [
            (8192, 8, 8, 512, 512, 16, ("w1", "w2_a", "w2_b"), (B16, B16)),
            (8192, 64, 64, 64, 64, 0, ("w1", "w2"), (B16, B16)),
            (8192, 64, 64, 64, 64, 0, ("w1", "w2", "base"), (B16, B16)),
            (8192, 8, 8, 512, 512, 0, ("w1", "w2"), (B16, B16)),
            (8192, 8, 8, 512, 512, 16, ("w1", "w2_a", "w2_b"), (B16, F32)),
            (77, 32, 32, 40, 40, 0, ("w1", "w2"), (B16, B16)),
        ]
    ],
    "ia3_scale": [
        (Case(name, sizes, attributes={"axis": axis}), mix)
        for name, sizes, axis, mix in [
            ("8192x4096", {"T": 8192, "C": 4096}, -1, (B16, B16)),
            ("8192x4096", {"T": 8192, "C": 4096}, -1, (B16, F32)),
            ("8192x4096", {"T": 8192, "C": 4096}, -1, (F32, F32)),
            ("8x320x64x64, axis 1", {"T": 8, "C": 320, "B0": 64, "B1": 64}, -3, (B16, B16)),
            ("77x1280", {"T": 77, "C": 1280}, -1, (B16, B16)),
        ]
    ],
    "add_scaled": [
        (Case("x".join(map(str, shape)), {"T": shape}, present=("base",)), mix)
        for shape, mix in [
            ((4096, 4096), (B16, B16)),
            ((4096, 4096), (B16, F32)),
            ((1280, 1280), (B16, B16)),
        ]
    ],
    "merge_": [
        (Case("x".join(map(str, shape)), {"T": shape}), mix)
        for shape, mix in [
            ((4096, 4096), (B16, B16)),
            ((4096, 4096), (B16, F32)),
            ((1280, 1280), (B16, B16)),
        ]
    ],
    "glora_weight": [
        (Case(f"{n}x{n} r={r}", {"O": n, "I": n, "r": r, "q": r}), mix)
        for n, r, mix in [
            (4096, 16, (B16, B16)),
            (4096, 16, (B16, F32)),
            (1280, 4, (B16, B16)),
        ]
    ],
    "tlora_weight": [
        (Case(f"{n}x{n} r={r}", {"O": n, "I": n, "r": r, "b": 1}), mix)
        for n, r, mix in [
            (4096, 16, (B16, B16)),
            (4096, 16, (B16, F32)),
            (1280, 4, (B16, B16)),
        ]
    ],
    "tlora_apply": [
        (Case(f"{b}x{t}x{n} r={r}", {"T": (b, t), "I": n, "O": n, "r": r, "b": b}), mix)
        for b, t, n, r, mix in [
            (2, 4096, 4096, 16, (B16, B16)),
            (2, 4096, 4096, 16, (B16, F32)),
            (1, 77, 1280, 4, (B16, B16)),
        ]
    ],
    "dora_weight": [
        (Case(f"{o}x{n}", {"O": o, "N": n}, present=p), mix)
        for o, n, p, mix in [
            (4096, 4096, (), (B16, B16)),
            (4096, 4096, ("delta",), (B16, B16)),
            (4096, 4096, (), (B16, F32)),
            (4096, 4096, (), (F32, F32)),
            (1280, 1280, (), (B16, B16)),
        ]
    ]
    + [
        (
            Case(f"{o}x{i} by input", {"O": o, "I": i, "k": k}, attributes={"axis": "in"}),
            (B16, B16),
        )
        for o, i, k in [(4096, 4096, ()), (1280, 1280, (3, 3))]
    ],
    "dora_lora_weight": [
        (Case(f"{o}x{n} r={r}", {"O": o, "N": n, "r": r}), mix)
        for o, n, r, mix in [
            (4096, 4096, 16, (B16, B16)),
            (4096, 4096, 16, (F32, F32)),
            (1280, 1280, 4, (B16, B16)),
        ]
    ],
    "dora_apply": [
        (Case(f"{t}x{i}x{o} r={r}", {"T": t, "I": i, "O": o, "r": r}), mix)
        for t, i, o, r, mix in [
            (8192, 4096, 4096, 16, (B16, B16)),
            (8192, 4096, 4096, 128, (B16, B16)),
            (8192, 4096, 4096, 16, (B16, F32)),
            (77, 1280, 1280, 4, (B16, B16)),
        ]
    ],
}

_K3 = {"padding": (1, 1)}
SHAPES |= {
    "lora_conv_apply": [
        (Case(f"{n}x{c}x{h}x{h} k={k} r={r}",
              {"N": n, "C": c, "H": h, "W": h, "O": c, "r": r, "I": c, "kH": k, "kW": k},
              present=p, attributes=_K3 if k == 3 else {}), mix)
        for n, c, h, k, r, p, mix in [
            (4, 320, 64, 3, 16, ("base",), (B16, B16)),
            (4, 320, 64, 3, 16, ("base",), (B16, F32)),
            (4, 1280, 32, 3, 16, ("base",), (B16, B16)),
            (4, 1280, 32, 1, 16, ("base",), (B16, B16)),
            (1, 512, 256, 3, 16, ("base",), (B16, B16)),
        ]
    ],
    "loha_conv_apply": [
        (Case(f"{n}x{c}x{h}x{h} k=3 r={r}",
              {"N": n, "C": c, "H": h, "W": h, "O": c, "r": r, "I": c, "kH": 3, "kW": 3},
              present=("base",), attributes=_K3), (B16, B16))
        for n, c, h, r in [(4, 320, 64, 4), (4, 1280, 32, 8)]
    ],
    "lokr_conv_apply": [
        (Case(f"{n}x{c}x{h}x{h} k=3 factor {a}" + (f" r={r}" if r else ""),
              {"N": n, "C": c, "H": h, "W": h, "a": a, "b": a, "c": c // a, "d": c // a,
               "kH": 3, "kW": 3} | ({"r": r} if r else {}),
              present=("base", "w1", *(("w2_a", "w2_b") if r else ("w2",))), attributes=_K3),
         (B16, B16))
        for n, c, h, a, r in [(4, 320, 64, 8, 0), (4, 1280, 32, 8, 0), (4, 1280, 32, 8, 16)]
    ],
}  # fmt: skip

_OFT = {"n": 128, "s": 32, "O": 4096}
_BOFT = {"m": 6, "n": 512, "b": 8, "O": 4096}
_SIX = {"n": 512, "s": 6, "O": 3072}
for _op, _v, _blocks in [
    ("oft_apply", {"T": 8192, "B": 1}, _OFT),
    ("oft_apply", {"T": 8192, "B": 1}, _SIX),
    ("oft_weight", {"N": 4096}, _OFT),
    ("boft_apply", {"T": 8192, "B": 1}, _BOFT),
    ("boft_weight", {"N": 4096}, _BOFT),
]:
    _name = " ".join(f"{k}={v}" for k, v in (_v | _blocks).items())
    SHAPES.setdefault(_op, []).extend(
        (Case(_name, _v | _blocks, scale=1.0), mix) for mix in [(B16, B16), (B16, F32), (F32, F32)]
    )
