"""``quads reproduce study``: what can be measured on the warm checkpoint alone, in minutes.

Gap against RAC ratio (uniform unsorted as in the paper, and sorted adaptive), the split into weights, activations and
engines, and symmetric against asymmetric quantisation per layer. The tokens are sampled by the real rollout.
"""

from __future__ import annotations

import json
from typing import Any

from .. import atomic, jobs
from ..proof.inputs import sample_for_analysis
from ..rl.runfolder import RunFolder
from .arms import describe_machine
from .bases import Selection, make_bases
from .config import base_name
from .folder import Root

OURS: Selection = (0.5, "adaptive", True)


def selections(ratios: list[float]) -> list[Selection]:
    """The paper's way and ours at each ratio; at 1 all blocks are taken, whatever the policy."""
    paper: list[Selection] = [(r, "uniform", False) for r in ratios]
    return paper + [(r, "adaptive", True) for r in ratios if r < 1] + ([OURS] if 0.5 not in ratios else [])


def run_study(root: Root) -> None:
    """Write ``study/study.json``; what is there of the same warm checkpoint and settings is left as it is."""
    config, warm = root.config, root.require_warm()
    key = {"warm": warm, "config": config.shared_hash, "study": config.study.model_dump(mode="json")}
    if root.study.exists() and {k: v for k, v in json.loads(root.study.read_text()).items() if k in key} == key:
        print(f"study: {root.study}, as it is", flush=True)
        return
    chosen = selections(config.study.ratios)
    make_bases(root, chosen)
    folder = RunFolder(atomic.make_folder(root.study.parent))
    flags = [*config.flags(), "--quads-recipe", "quads"]
    rl = config.rl_config(root.base(base_name(*OURS)), folder.path, config.seed).to_dict()
    info: dict[str, Any] = {"rl": rl, "quads": {"recipe": "quads"}, "argv": flags}
    print(f"sampling {config.study.sequences} sequences; an engine starts", flush=True)
    samples, model = sample_for_analysis(folder, info, folder.path, config.study.sequences)
    print("split: weights, activations, engines", flush=True)
    jobs.launch(
        "analyze",
        {"model": str(model), "samples": str(samples), "out": str(folder.path / "split")},
        jobs.without_layout(flags),
        nproc=1,
        logs=folder.logs,
    )
    print("ratios; symmetric against asymmetric", flush=True)
    found = folder.path / "measured.json"
    settings = {
        "part": "study",
        "warm": str(root.warm),
        "samples": str(samples),
        "bases": [
            {"folder": str(root.base(base_name(*s))), "ratio": s[0], "policy": s[1], "sorted": s[2]} for s in chosen
        ],
        "ours": str(root.base(base_name(*OURS))),
        "drifts": config.study.drifts,
        "seed": config.seed,
        "out": str(found),
    }
    jobs.launch("reproduce", settings, jobs.without_layout(flags), nproc=1, logs=folder.logs)
    whole = {
        **key,
        **json.loads(found.read_text()),
        "split": json.loads((folder.path / "split/analyze.json").read_text()),
    }
    atomic.write_json(root.study, {**whole, "machine": describe_machine()})
