"""Compile a suite's kernels, where no GPU is: `python benchmarks/suite_kernels.py h200 -o FOLDER`.

A machine with the GPU then records with them, and compiles little or nothing:

    SOLOIST_CACHE=FOLDER python benchmarks/record.py h200

They are the kernels of `soloist compile` for every shape and quantised folder that commands of
`bench decode` and `bench prefill` name. Folders need not be there: their forms tell enough. GGUF
files and models with a name are left out; `soloist compile` takes those.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from quantized_folders import FORMS, SHAPES, config_of
from record import ROOT, add_choice, chosen_files
from soloist.bench.subject import Shape, read_shape, shape_dtype
from soloist.device import usable_cores
from soloist.engine.compiling import compile_kernels
from soloist.engine.support import support_of
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import Plan
from soloist.model.quantized import Codes
from soloist.weights.choice import Rounding
from suites import QUANTIZED

_ARCH = "sm_90a"  # of all suites with GPUs


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 0 once all are compiled."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_choice(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="the cache to fill"
    )
    asked = parser.parse_args(given)
    files = chosen_files(parser, asked).values()
    commands = [command for file in files for command in file.commands]
    for command, plan in plans(commands):
        if plan is None:
            print(f"left out: soloist {command}", flush=True)
            continue
        made = compile_kernels(plan, asked.output.absolute(), usable_cores(), lambda _: None)
        new = [kernel for kernel in made if not kernel.was_kept]
        print(f"{len(made)} kernels, {len(new)} of them new: soloist {command}", flush=True)
    return 0


def plans(commands: Sequence[str]) -> Iterator[tuple[str, Plan | None]]:
    """Of each command the plan whose kernels it runs; None where it runs none that is known here.

    Raises:
        UserError: a shape cannot be used.
    """
    for command in commands:
        shape, ranks = _read(command)
        if shape is None:
            yield command, None
            continue
        support = support_of(
            TYPICAL[_ARCH], shape.config, shape.dtype, ranks, shape.stored, shape.kv
        )
        yield command, support.plan


def _read(command: str) -> tuple[Shape | None, int]:
    """The shape that is measured, and on how many GPUs."""
    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("words", nargs="*")
    for name in ("--shape", "--precision", "--kv", "--device"):
        options.add_argument(name)
    for name in ("--weights", "--head-weights"):
        options.add_argument(name, type=Codes)
    options.add_argument("--gpus", type=int, default=1)
    asked, _ = options.parse_known_args(shlex.split(command))
    if asked.words[:2] not in (["bench", "decode"], ["bench", "prefill"]) or asked.device == "cpu":
        return None, asked.gpus
    dtype = shape_dtype(asked.precision or "auto")
    rounding = Rounding(asked.weights, asked.head_weights)
    if asked.shape:
        return read_shape(ROOT / asked.shape, dtype, rounding, asked.kv), asked.gpus
    folder = Path(asked.words[2])
    form = folder.parent.name
    if folder.parent.parent != Path(QUANTIZED) or form not in FORMS:
        return None, asked.gpus
    with TemporaryDirectory() as place:
        file = Path(place) / "config.json"
        file.write_text(json.dumps(config_of(SHAPES / f"{folder.name}.json", FORMS[form]())))
        return read_shape(file, dtype, rounding, asked.kv), asked.gpus


if __name__ == "__main__":
    sys.exit(main())
