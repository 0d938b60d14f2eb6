"""Long measurements of KV costs, for lessons to show as recorded.

    python -m pdlab.workbench.measure kv_formats     (about 30 minutes on two idle cores)
    python -m pdlab.workbench.measure windows        (about 10 minutes)

They are written to `data/measured/`, after each segment of the text anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pdlab
from pdlab.bench.topics import topic_tokens
from pdlab.machine import describe_machine
from pdlab.shipped import shipped
from pdlab.workbench.kv_costs import KVCost, kv_costs
from pdlab.workbench.kv_study import Study, format_configs, window_configs

TOKENS = {"kv_formats": 20 * 1024, "windows": 4096}
SEGMENT_LEN = {"kv_formats": 1024, "windows": 4096}
REFERENCE = {"kv_formats": "fp32", "windows": "full"}
CHUNK_SIZE = 256


def measure(name: str, out: Path, labels: list[str] | None = None) -> None:
    """Run a study, or the part of it that has these labels, and keep it in a file."""
    configs = format_configs() if name == "kv_formats" else window_configs()
    model = pdlab.load("smollm2-135m", dtype="fp32")
    machine = describe_machine()

    def save(costs: list[KVCost]) -> None:
        Study(
            costs=costs,
            text="pydoc_data.topics",
            segment_len=SEGMENT_LEN[name],
            chunk_size=CHUNK_SIZE,
            reference=REFERENCE[name],
            model=model.name,
            machine=machine,
            command=f"python -m pdlab.workbench.measure {name}",
        ).save(out)
        print(f"{costs[0].num_tokens:,} of {TOKENS[name]:,} tokens", flush=True)

    kv_costs(
        model,
        {label: configs[label] for label in labels or configs},
        topic_tokens(model, TOKENS[name]),
        segment_len=SEGMENT_LEN[name],
        chunk_size=CHUNK_SIZE,
        reference=REFERENCE[name],
        after_segment=save,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=sorted(TOKENS))
    parser.add_argument("--only", nargs="+", help="labels to measure, the reference among them")
    parser.add_argument("--out", type=Path, help="default: data/measured/STUDY.json")
    args = parser.parse_args()
    if args.only and not args.out:
        parser.error("--only measures a part of the study: name another file with --out")
    out = args.out or shipped("data") / "measured" / f"{args.study}.json"
    measure(args.study, out, args.only)


if __name__ == "__main__":
    main()
