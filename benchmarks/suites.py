"""What is recorded in `results/`: for each file the commands that make its rows, in order.

Commands are what a user types after `soloist`, run from the root of the repository. Commands that
measure other engines are whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_SHAPES = ("llama-3.2-1b", "qwen3-1.7b", "laneformer-2b-as-llama", "llama-3.1-8b")
_RUN = "--prompt-tokens 128 --new-tokens 256 --precision bf16"
_SAMPLED = f"{_RUN} --temperature 1"  # a mixture's experts vary
_ON_RANKS = (
    ("laneformer-2b", "fp16"), ("laneformer-2b-as-llama", "fp16"), ("llama-3.2-1b", "bf16"),
    ("llama-3.1-8b", "bf16"),
)  # fmt: skip
_LONG = "--prompt-tokens 128 --new-tokens 512"

_ROUNDED = ("int4", "int8", "fp8", "int4 --head-weights int8")

# Where `record.py` makes quantised models with `quantized_folders.py`, for commands that name one.
QUANTIZED = "build/quantized"


@dataclass(frozen=True, slots=True)
class Service:
    """A server that is measured from outside; it runs while the commands of its file do.

    Attributes:
        name: of the engine, in rows.
        port: where it listens.
        module: what Python runs to start it, with these arguments.
        folder: to start it in, from the root of the repository.
        needs: packages that have to be installed for it.
    """

    name: str
    port: int
    module: str
    arguments: str
    folder: str = "."
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class File:
    """One result file."""

    commands: tuple[str, ...]
    services: tuple[Service, ...] = ()


# Python that étude was not trained on: files of this project.
_HELD_OUT = tuple(
    f"src/soloist/{file}"
    for file in ("kv/allocator.py", "text/grammar.py", "speculation/drafter.py")
)


def _held_out(options: str, more: str = "") -> tuple[str, ...]:
    """étude goes on with such a file, whose rest is the prediction, as it is and edited."""
    return tuple(
        f"bench decode etude {options} --prompt-tokens 512 --new-tokens 256 --temperature 0 "
        f"--text {file} --prediction --wrong {wrong}{more if wrong == 0 else ''}"
        for file in _HELD_OUT
        for wrong in (0, 0.1)
    )


def _decode(shape: str, options: str) -> str:
    return f"bench decode --shape benchmarks/shapes/{shape}.json {options}"


def _quantized(form: str, shape: str) -> str:
    return f"{QUANTIZED}/{form}/{shape}"


# étude's own folder is called as its name, so that both servers call the model alike.
_SERVICES = (
    Service(
        "soloist serve", 8731, "soloist",
        "serve etude --device cpu --precision fp32 --speculate off --port 8731",
    ),
    Service(
        "transformers serve", 8732, "transformers.cli.transformers",
        "serve etude --device cpu --dtype float32 --port 8732",
        "src/soloist/models", ("fastapi", "accelerate"),
    ),
)  # fmt: skip
_LARGE = Service(
    "soloist serve", 8733, "soloist",
    f"serve {_quantized('bf16', 'llama-3.1-8b')} --precision bf16 --speculate off --port 8733",
)  # fmt: skip
_URLS = " ".join(
    [*(f"http://localhost:{s.port}" for s in _SERVICES), *(f"--name '{s.name}'" for s in _SERVICES)]
)
_ASKED = "--model etude --prompt-tokens 64 --prompt-tokens 512 -n 64 --runs 5 --prefix cold"
_LOOP = "--model etude --turns 5 --prompt-tokens 200 --tool-tokens 50 -n 32 --runs 3"
_MEMORY = (
    "--config src/soloist/models/etude/config.json --precision fp32 "
    "--bandwidth benchmarks/results/cpu-bandwidth.json"
)

# One server with a script for an engine, and the same as a replica; see tests/end_to_end/hop.py.
_HOP = "http://127.0.0.1:18766 http://127.0.0.1:18765"
_STREAMS = "--api completions --prompt-tokens 256 -n 500 --runs 50 --prefix cold"


def _hop(name: str, way: str) -> File:
    return File(
        (f"bench serve {_HOP} --name direct --name '{name}' {_STREAMS}",),
        (
            Service("direct", 18766, "end_to_end.hop", "direct"),
            Service(name, 18765, "end_to_end.hop", way, needs=("ray",)),
        ),
    )


# On one GPU, whichever it is: a file's name begins with its kind.
_KEPT = (
    ("llama-3.1-8b", "--prompt-tokens 100000 --kept 99840 --kept 99072 --runs 3"),
    ("llama-3.1-8b", "--prompt-tokens 32000 --kept 31744 --runs 5"),
    ("llama-3.2-1b", "--prompt-tokens 100000 --kept 99840 --runs 5"),
    ("llama-3.1-8b", "--prompt-tokens 32000 --prompt-tokens 100000 --prefix cold --runs 2"),
)
# The file of an H100 is of the commit before attention from pages was the default.
_WAYS_OF_ATTENTION = {
    "h100": ("", " --page-attention"),
    "h200": (" --no-page-attention", " --page-attention"),
}
# Those of an H100 are of when rows were the default.
_WAYS_OF_PRODUCTS = {
    "h100": ("", " --packed-prompts"),
    "h200": (" --no-packed-prompts", " --packed-prompts"),
}
# Of quantised weights: H100s were recorded when rows were the default.
_ROWS = {"h100": "", "h200": " --no-packed-prompts"}
_EIGHT_BITS = {
    ("h100", "int4"): (), ("h100", "fp8"): (), ("h200", "int4"): (),
    ("h200", "fp8"): (" --packed-prompts --eight-bit-prompts",),
}  # fmt: skip
# And of before lookup. Texts of random weights hardly repeat: what lookup costs then stands beside
# the worst predictions.
_LOOKUP = {"h100": "", "h200": " --speculate auto"}
_ETUDE_TEMPERATURES: Mapping[str, tuple[int, ...]] = {"h100": (), "h200": (0, 1)}


# What each of several requests gains and loses by the others' predictions.
_SIDE_BY_SIDE: Mapping[str, tuple[str, ...]] = {
    "h100": (),
    "h200": tuple(
        f"bench decode {_quantized('bf16', 'qwen3-1.7b')} {_RUN} --sequences 3 --prediction "
        f"--wrong {wrong}{_LOOKUP['h200'] if wrong else ''}"
        for wrong in (0, 1)
    ),
}
# Of several requests the first has a prediction, which is right; the others draft nothing.
_BESIDE: Mapping[str, tuple[str, ...]] = {
    "h100": (),
    "h200": tuple(
        f"bench decode {_quantized(form, shape)} --prompt-tokens 128 --new-tokens 512 "
        f"--precision bf16 --sequences {requests} --prediction --predicted 1"
        for form, shape, requests in (
            ("bf16", "qwen3-1.7b", 2),
            ("bf16", "qwen3-1.7b", 3),
            ("bf16", "llama-3.2-1b", 2),
            ("bf16", "llama-3.1-8b", 3),
            ("int4", "llama-3.1-8b", 3),
        )
    ),
}
# The shape of a model made for a million positions.
_MILLION: Mapping[str, tuple[str, ...]] = {
    "h100": (),
    "h200": (
        _decode(
            "long/llama-3.1-8b",
            "--prompt-tokens 128 --new-tokens 64 --precision bf16 --context 1000000 --kv int4 "
            "--runs 3",
        ),
    ),
}


def _prefill(shape: str, options: str) -> str:
    return f"bench prefill --shape benchmarks/shapes/{shape}.json --precision bf16 {options}"


def _of_one_gpu(kind: str) -> dict[str, File]:
    """Files of prompts, predictions and caches in fewer bits."""
    files = {
        "one-copy": (
            *(
                _prefill(shape, f"--prompt-tokens 128 --prompt-tokens 2048 --prefix cold{way}")
                for shape in _SHAPES
                for way in _WAYS_OF_PRODUCTS[kind]
            ),
            *(
                _prefill(
                    "llama-3.1-8b",
                    f"--weights {weights} --prompt-tokens 128 --prompt-tokens 2048 --prefix cold"
                    f"{way}",
                )
                for weights in ("int4", "fp8")
                for way in (_ROWS[kind], _WAYS_OF_PRODUCTS[kind][1], *_EIGHT_BITS[kind, weights])
            ),
        ),
        "kept-prompts": tuple(
            _prefill(shape, f"{options}{way}")
            for shape, options in _KEPT
            for way in _WAYS_OF_ATTENTION[kind]
        ),
        # A prompt's last tokens: by a pass, and in rounds of the decode kernel.
        "tails": tuple(
            _prefill(
                shape,
                f"--prompt-tokens {kept + 8} --prompt-tokens {kept + 16} --kept {kept} "
                f"--path {path} --runs 5",
            )
            for shape in ("llama-3.1-8b", "llama-3.2-1b")
            for kept in (31744, 99840)
            for path in ("prefill", "decode")
        ),
        "predictions": (
            *(
                f"bench decode {_quantized(form, shape)} {_RUN} --prediction --wrong {wrong}"
                f"{_LOOKUP[kind] if wrong == 1 else ''}"
                for form, shape, wrongs in (
                    ("bf16", "llama-3.1-8b", (0, 0.25, 1)),
                    ("bf16", "qwen3-1.7b", (0, 1)),
                    ("int4", "llama-3.1-8b", (0,)),
                )
                for wrong in wrongs
            ),
            *(
                "bench decode etude --precision bf16 --prompt-tokens 512 --new-tokens 512 "
                f"--temperature {temperature} --prediction --wrong 0.1"
                for temperature in _ETUDE_TEMPERATURES[kind]
            ),
            *_SIDE_BY_SIDE[kind],
            *_BESIDE[kind],
        ),
        # Back from the host's memory and from files; and beside a stream.
        "contexts": tuple(
            _prefill("llama-3.1-8b", f"--prompt-tokens 32000 {where} --runs 5")
            for where in ("--prefix offloaded", "--prefix saved", "--prefix cold --streams 1")
        ),
        "kv": (
            *(
                _decode("llama-3.1-8b", f"{_RUN} --context {context}{kv}")
                for context in (8192, 128000)
                for kv in ("", " --kv int8", " --kv fp8", " --kv int4")
            ),
            *_MILLION[kind],
        ),
    }
    return {f"{kind}-{name}.json": File(commands) for name, commands in files.items()}


SUITES: Mapping[str, Mapping[str, File]] = {
    "cpu": {
        "cpu-bandwidth.json": File(("bench bandwidth --device cpu",)),
        "etude-cpu.json": File(
            (
                "bench decode etude --device cpu --prompt-tokens 256 --new-tokens 256 --runs 7 "
                "--against transformers",
            )
        ),
        "etude-cpu-prefill.json": File(
            (
                "bench prefill etude --device cpu --prompt-tokens 256 --prompt-tokens 1024 "
                "--prompt-tokens 4096",
            )
        ),
        "etude-cpu-startup.json": File(
            ("bench startup etude --device cpu", "bench startup etude --device cpu --serve")
        ),
        # Files of one model, each in turns with its folder in 16 bits.
        "gguf-cpu.json": File(
            tuple(
                f"bench decode {_quantized('bf16', 'llama-3.2-1b')} "
                f"--beside {_quantized(form, 'llama-3.2-1b')} --device cpu "
                "--prompt-tokens 16 --new-tokens 16 --runs 15"
                for form in ("gguf-Q8_0", "gguf-Q4_0", "gguf-Q4_K_M")
            )
        ),
        "etude-cpu-busy.json": File(
            tuple(
                f"bench {what} --busy {busy}"
                for busy in (0, 1)
                for what in (
                    "decode etude --device cpu --prompt-tokens 256 --new-tokens 256 --runs 5",
                    "prefill etude --device cpu --prompt-tokens 64 --prompt-tokens 256 "
                    "--prompt-tokens 1024 --prompt-tokens 2048 --prefix cold --runs 7",
                )
            )
        ),
        # Drafts, and the same texts without: an answer as its prediction, a part of it wrong.
        "etude-cpu-speculation.json": File(
            tuple(
                "bench decode etude --device cpu --precision fp32 --prompt-tokens 256 "
                f"--new-tokens 256 --runs 5 {drafts}"
                for drafts in (
                    "--prediction --wrong 0",
                    "--prediction --wrong 0.25",
                    "--prediction --wrong 1",
                    "--speculate auto",
                )
            )
        ),
        "etude-cpu-held-out.json": File(
            _held_out("--device cpu --precision fp32", " --speculate auto")
        ),
        # Python that étude was not trained on.
        "etude-quantized-cpu.json": File(
            tuple(
                f"bench accuracy etude --device cpu --precision bf16 --weights {rounded} "
                "--positions 4096 --text src/soloist/reference/blocks.py --against unquantised"
                for rounded in _ROUNDED
            )
        ),
        "etude-kv-cpu.json": File(
            tuple(
                f"bench accuracy etude --device cpu --precision fp32 --kv {kv} --positions 32768"
                for kv in ("int8", "fp8", "int4")
            )
        ),
        "etude-cpu-servers.json": File(
            (
                f"bench serve {_URLS} {_ASKED} {_MEMORY}",
                f"bench agent {_URLS} {_LOOP}",
            ),
            _SERVICES,
        ),
        "etude-cpu-neighbours.json": File(
            (
                f"bench neighbours http://localhost:{_SERVICES[0].port} --name 'soloist serve' "
                "--pid auto",
            ),
            _SERVICES[:1],
        ),
    },
    # Both are on one machine, with the client: PYTHONPATH=src:tests.
    "ray": {
        "ray-hop.json": _hop("Ray, HAProxy, throughput settings", "ray"),
        "ray-hop-as-it-comes.json": _hop("Ray as it comes", "ray-as-it-comes"),
    },
    "h200": _of_one_gpu("h200")
    | {
        "h200.json": File(
            (
                *(_decode(shape, _RUN) for shape in _SHAPES),
                *(_decode(shape, f"{_RUN} --columns 8") for shape in _SHAPES),
                _decode("llama-3.2-1b", f"{_RUN} --context 2048"),
                _decode("llama-3.2-1b", f"{_RUN} --sequences 8 --context 2048"),
                *(
                    _decode(shape, f"--prompt-tokens {tokens} --new-tokens 64 --precision bf16")
                    for tokens in (2048, 16)
                    for shape in ("qwen3-1.7b", "laneformer-2b-as-llama")
                ),
                *(
                    _decode(shape, f"{_RUN} --context {tokens}")
                    for shape in ("llama-3.2-1b", "qwen3-1.7b")
                    for tokens in (8192, 32000)
                ),
                _decode("llama-3.1-8b", f"{_RUN} --context 32000"),
                _decode("llama-3.1-8b", f"{_RUN} --context 128000"),
                _decode("llama-3.1-8b", f"{_RUN} --sequences 8 --context 2048"),
            )
        ),
        "h200-startup.json": File(
            (
                "bench startup etude --runs 2",
                "bench startup --shape benchmarks/shapes/llama-3.2-1b.json --runs 2",
            )
        ),
        "h100-startup-compiled.json": File(
            ("bench startup etude --runs 3 --kernel-cache compiled",)
        ),
        "h200-accuracy.json": File(
            (
                "bench accuracy etude --precision bf16 --against transformers --repeats 1000",
                *(
                    f"bench accuracy --shape benchmarks/shapes/{shape}.json --precision bf16 "
                    "--against transformers"
                    for shape in _SHAPES[:3]
                ),
            )
        ),
        "h200-prefill.json": File(
            tuple(
                f"bench prefill --shape benchmarks/shapes/{shape}.json --precision bf16 "
                "--prompt-tokens 128 --prompt-tokens 2048 --prompt-tokens 8192"
                for shape in ("llama-3.2-1b", "llama-3.1-8b")
            )
        ),
        "h200-bandwidth.json": File(("bench bandwidth --device cuda",)),
        "h200-quantized.json": File(
            (
                # Side by side, since their ratio is looked at: a card gets warmer by the minute.
                f"bench decode {_quantized('int4', 'llama-3.1-8b')} {_RUN}",
                f"bench decode {_quantized('int4', 'llama-3.1-8b')} {_RUN} --columns 8",
                *(
                    f"bench decode {_quantized(form, shape)} {_RUN}"
                    for shape, forms in (
                        ("llama-3.1-8b", ("int4-int8-head", "fp8-block", "fp8")),
                        ("laneformer-2b-as-llama", ("int4", "fp8")),
                        ("qwen3-1.7b", ("int4", "int4-int8-head")),
                        ("llama-3.2-1b", ("int4", "int4-int8-head")),
                    )
                    for form in forms
                ),
            )
        ),
        "h200-held-out.json": File(_held_out("--precision bf16")),
        # A conversation of some hundred thousand tokens.
        "h200-agent.json": File(
            (
                f"bench agent http://localhost:{_LARGE.port} --name 'soloist serve' "
                "--api completions --turns 8 --prompt-tokens 108000 --tool-tokens 1000 -n 64 "
                "--runs 2",
            ),
            (_LARGE,),
        ),
        # A mixture: one query in each format, eight columns, after many positions, and prompts.
        "h200-experts.json": File(
            (
                *(
                    _decode("qwen3-30b-a3b", f"{_SAMPLED}{weights}")
                    for weights in ("", " --weights fp8", " --weights int4")
                ),
                _decode("qwen3-30b-a3b-fp8", _SAMPLED),  # in blocks, as its files are
                _decode("qwen3-30b-a3b", f"{_SAMPLED} --columns 8"),
                _decode("qwen3-30b-a3b", f"{_SAMPLED} --context 32000"),
                _prefill("qwen3-30b-a3b", "--prompt-tokens 128 --prompt-tokens 2048 --prefix cold"),
            )
        ),
        "h200-gguf.json": File(
            tuple(
                f"bench decode {_quantized(form, 'llama-3.1-8b')} {_RUN}"
                for form in ("int4-int8-head", "gguf-Q4_K_M", "gguf-Q4_0", "gguf-Q8_0")
            )
        ),
        # Where no product reads packed weights: rows beside them, and each matrix unpacked.
        "h200-unpacked-prompts.json": File(
            tuple(
                f"bench prefill --shape benchmarks/shapes/{shape}.json {options} "
                f"--prompt-tokens 128 --prompt-tokens 2048 --prefix cold{way}"
                for shape, options, rows in (
                    ("llama-3.1-8b", "--precision bf16", " --no-packed-prompts"),
                    ("llama-3.1-8b", "--precision bf16 --weights int4", " --no-packed-prompts"),
                    ("laneformer-2b", "--precision fp16", ""),
                    ("qwen3-30b-a3b", "--precision bf16", ""),
                )
                for way in (rows, " --unpack-prompts")
            )
        ),
        # Prompts of a file whose matrices are K-quants.
        "h200-gguf-prompts.json": File(
            tuple(
                f"bench prefill {_quantized('gguf-Q4_K_M', 'llama-3.1-8b')} "
                f"--prompt-tokens 128 --prompt-tokens 2048 --prefix cold{way}"
                for way in _WAYS_OF_PRODUCTS["h200"]
            )
        ),
        "h200-quantized-accuracy.json": File(
            (
                *(
                    f"bench accuracy etude --precision bf16 --weights {rounded} "
                    "--against transformers"
                    for rounded in _ROUNDED
                ),
                *(
                    f"bench accuracy {_quantized(form, f'llama-3.2-1b{outliers}')} "
                    "--precision bf16 --against transformers"
                    for outliers in ("", "-outliers")
                    for form in ("int4", "fp8-block")
                ),
            )
        ),
        # All 48 layers are 61 GB of files. Of 12 a quantised file and its copy in 16 bits fit, too.
        "h200-experts-accuracy.json": File(
            tuple(
                f"bench accuracy {model} --precision bf16 --against transformers --repeats 200"
                for model in (
                    "--shape benchmarks/shapes/qwen3-30b-a3b.json",
                    "--shape benchmarks/shapes/qwen3-30b-a3b-12-layers.json",
                    "--shape benchmarks/shapes/qwen3-30b-a3b-12-layers.json --weights fp8",
                    _quantized("fp8-block", "qwen3-30b-a3b-12-layers"),
                    _quantized("int4", "qwen3-30b-a3b-12-layers"),
                )
            )
        ),
        # Of prompts with activations in 8 bits.
        "h200-prompt-accuracy.json": File(
            (
                "bench accuracy etude --precision bf16 --weights fp8 --prompts --packed-prompts "
                "--eight-bit-prompts",
            )
        ),
        # What a model takes of a GPU's memory and of the host's, with the context that a table of
        # memory is about.
        "h200-one-copy-startup.json": File(
            tuple(
                f"bench startup {_quantized(form, 'llama-3.1-8b')} --precision bf16 "
                "--context 8192 --runs 2 --kernel-cache warm"
                for form in ("bf16", "int4", "fp8")
            )
        ),
        # Files of about as many bytes: 32 layers in 4 bits, and 8 in 16.
        "h200-quantized-startup.json": File(
            tuple(
                f"bench startup {folder} --precision bf16 --runs 2 --kernel-cache warm"
                for folder in (
                    _quantized("int4", "llama-3.1-8b"),
                    _quantized("bf16", "llama-3.1-8b-8-layers"),
                )
            )
        ),
    },
    "h100": _of_one_gpu("h100"),
    # Several of them, linked by NVLink: as many as a machine has, by `--only`.
    "8-h200": {
        f"{gpus}-h200.json": File(
            (
                *(
                    _decode(shape, f"{tokens} --precision {precision} --gpus {gpus}")
                    for tokens in (
                        "--prompt-tokens 128 --new-tokens 512",
                        "--prompt-tokens 2048 --new-tokens 64",
                    )
                    for shape, precision in _ON_RANKS
                ),
                _decode("laneformer-2b", f"{_LONG} --context 3500 --precision fp16 --gpus {gpus}"),
                _decode("llama-3.1-8b", f"{_LONG} --context 32000 --precision bf16 --gpus {gpus}"),
                *(
                    f"bench accuracy --shape benchmarks/shapes/{shape}.json "
                    f"--precision {precision} --repeats 200 --gpus {gpus}"
                    for shape, precision in _ON_RANKS[:3]
                ),
            )
        )
        for gpus in (1, 2, 4, 8)
    }
    | {
        f"{gpus}-h200-prompts.json": File(
            (
                *(
                    f"bench prefill --shape benchmarks/shapes/{shape}.json --precision {precision} "
                    f"--prompt-tokens 128 --prompt-tokens 512 --prompt-tokens 2048 --gpus {gpus}"
                    for shape, precision in _ON_RANKS
                ),
                "bench startup --shape benchmarks/shapes/laneformer-2b.json --precision fp16 "
                f"--runs 2 --gpus {gpus}",
            )
        )
        for gpus in (1, 2, 4, 8)
    }
    | {
        "2-h200-quantized.json": File(
            tuple(
                _decode(shape, f"--weights int4 {_RUN} --gpus 2")
                for shape in ("llama-3.1-8b", "laneformer-2b-as-llama")
            )
        ),
        "2-h200-kept-prompts.json": File(
            tuple(_prefill(shape, f"{options} --gpus 2") for shape, options in _KEPT)
        ),
        "2-h200-unpacked-prompts.json": File(
            tuple(
                f"bench prefill --shape benchmarks/shapes/llama-3.1-8b.json --precision bf16 "
                f"{weights}--gpus 2 --prompt-tokens 128 --prompt-tokens 2048 --prefix cold{way}"
                for weights in ("", "--weights int4 ")
                for way in ("", " --unpack-prompts")
            )
        ),
        "2-h200-experts.json": File((_decode("qwen3-30b-a3b", f"{_SAMPLED} --gpus 2"),)),
        "2-h200-predictions.json": File(
            (
                f"bench decode {_quantized('bf16', 'llama-3.1-8b')} {_RUN} --gpus 2 "
                "--prediction --wrong 0",
            )
        ),
    },
}

# Result files of other engines: what printed the lines that `rivals.py` made them of.
RIVALS: Mapping[str, tuple[str, ...]] = {
    "h200-rivals.json": tuple(
        f"python benchmarks/vllm_decode.py {asked}"
        for asked in (*_SHAPES, *(f"{_SHAPES[-1]} --weights {w}" for w in ("fp8", "int4")))
    ),
    "h200-rivals-experts.json": (
        "python benchmarks/vllm_decode.py qwen3-30b-a3b --temperature 1",
        "python benchmarks/vllm_decode.py qwen3-30b-a3b-fp8 --weights fp8-block --temperature 1",
    ),
    # The prompts of `_KEPT`; one engine reads all of a shape.
    "h200-rivals-kept-prompts.json": (
        "python benchmarks/vllm_decode.py llama-3.1-8b --prompt-tokens 32000 100000 "
        "--keep 100000:99840 100000:99072 32000:31744 --new-tokens 1 --runs 3",
        "python benchmarks/vllm_decode.py llama-3.2-1b --keep 100000:99840 --new-tokens 1 --runs 5",
    ),
}

# What `in_turn.py` runs with two commits in turn, and the files that it made.
_IN_TURN = (
    *(_decode(shape, f"{_RUN} --runs 3") for shape in _SHAPES),
    _decode("qwen3-1.7b", "--prompt-tokens 2048 --new-tokens 64 --precision bf16 --runs 3"),
    "bench startup etude --runs 5 --kernel-cache warm",
)
IN_TURN: Mapping[str, tuple[str, ...]] = {
    "h200-in-turn.json": _IN_TURN,
    "2-h100-in-turn.json": tuple(_decode(shape, f"{_RUN} --runs 3 --gpus 2") for shape in _SHAPES),
    "h100-in-turn.json": ("bench startup etude --runs 2 --kernel-cache warm",),
    "h200-quantized-in-turn.json": (
        *(
            _decode(shape, f"--weights int4 {_RUN} --runs 3{columns}")
            for shape in ("llama-3.1-8b", "qwen3-1.7b")
            for columns in ("", " --columns 8")
        ),
        _decode("llama-3.1-8b", f"--weights int4 --head-weights int8 {_RUN} --runs 3"),
    ),
    # Prompts with rows beside packed weights by default, then with one copy by default.
    "h200-one-copy-in-turn.json": tuple(
        _prefill(shape, "--prompt-tokens 128 --prompt-tokens 2048 --prefix cold --runs 9")
        for shape in _SHAPES
    ),
    # A first start, which compiles products, and one that finds them compiled.
    "h200-one-copy-startup-in-turn.json": (
        "bench startup --shape benchmarks/shapes/llama-3.2-1b.json --precision bf16 --runs 1",
        "bench startup --shape benchmarks/shapes/llama-3.2-1b.json --precision bf16 --runs 2 "
        "--kernel-cache warm",
    ),
}
