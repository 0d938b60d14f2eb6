"""One model on the ranks of a torch.distributed job, from the command line.

    torchrun --standalone --nproc-per-node 2 -m pdlab.parallel.torchrun --tensor-parallel 2 \\
        "Why is the sky blue?"

Rank 0 has the engine, and prints; it is a rank of the model, too. torchrun ends the whole job when
a rank fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.models import load_outline
from pdlab.models.catalog import DEFAULT_MODEL
from pdlab.models.loading import DTYPES
from pdlab.parallel.command_line import (
    Terminated,
    heed_sigterm,
    outputs_as_json,
    print_outputs,
    prompt_of,
)
from pdlab.parallel.group import RankLost
from pdlab.parallel.hosts.torchrun import serve_rank


def main() -> NoReturn:
    """Be one rank of a job. Exits with 1 if there is an error."""
    args = _parser().parse_args()
    status = 1
    try:
        if int(os.environ.get("RANK", 0)):
            serve_rank()
        else:
            heed_sigterm()
            _generate(args)
        status = 0
    except (ValueError, OSError, RankLost) as error:
        print(f"error: {error}", file=sys.stderr)
    except Terminated:
        print("error: this job was ended (SIGTERM)", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # whatever threads there still are


def _generate(args: argparse.Namespace) -> None:
    """Rank 0: run the prompts, and print what came of them."""
    model = load_outline(args.model, device=args.device, dtype=args.dtype, progress=False)
    config = EngineConfig(
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
        micro_batches=args.micro_batches,
        exact=args.exact,
        rank_host="torchrun",
    )
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, ignore_eos=args.ignore_eos
    )
    with Engine(model, config) as engine:
        outputs = engine.generate([prompt_of(text, model) for text in args.prompts], params)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the work is done
        exchanged = _exchanged(engine)
    if args.json:
        print(json.dumps({"outputs": outputs_as_json(outputs), **exchanged}))
        return
    print_outputs(outputs)
    print(
        f"{exchanged['num_steps']} steps on {config.num_ranks} ranks: "
        f"{exchanged['wire_bytes'] / 2**20:.2f} MiB between them, {exchanged['share']:.0%} of "
        "their time"
    )


def _exchanged(engine: Engine) -> dict[str, Any]:
    """What went from rank to rank, of all steps."""
    steps = engine.trace.steps
    return {
        "num_steps": len(steps),
        "wire_bytes": sum(each.wire_bytes for step in steps for each in step.collectives),
        "share": sum(step.exchange_share * step.wall_s for step in steps)
        / sum(step.wall_s for step in steps),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m pdlab.parallel.torchrun",
        description="Run prompts on one model that is spread over the ranks of a job.",
    )
    add = parser.add_argument
    add("prompts", nargs="+", help="text; token ids as 3,14,15 for a model without a tokenizer")
    add("--tensor-parallel", type=int, default=1, help="ranks that each layer is cut over")
    add("--pipeline-parallel", type=int, default=1, help="stages that the layers are dealt out to")
    add("--micro-batches", type=int, default=None, help="pieces of a step; as many as stages")
    add("--model", default=DEFAULT_MODEL)
    add("--dtype", choices=tuple(DTYPES), default=None, help="fp32 on cpu, bf16 on cuda")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each rank")
    add("--max-tokens", type=int, default=32)
    add("--temperature", type=float, default=0.0)
    add("--ignore-eos", action="store_true")
    add("--exact", action="store_true", help="bit-identical whatever the batch")
    add("--json", action="store_true", help="print one line of JSON")
    return parser


if __name__ == "__main__":
    main()
