"""`soloist plan`: what a machine can reach for a model, without loading or allocating anything."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from soloist.cli.remarks import basis, remarks
from soloist.cli.tables import show_table
from soloist.cli.terminal import millions, print_json, say
from soloist.errors import CudaMissing, HardwareNotDetected, SettingError, gigabytes
from soloist.jit.bindings import driver
from soloist.model.dtype import Dtype
from soloist.model.folder import CONFIG_FILE, config_file, find_model
from soloist.model.kv_format import KvName, kv_format
from soloist.model.tensors import parameters
from soloist.planning.bill import Costs, bill
from soloist.planning.cost import read_api_prices, read_machine, read_work
from soloist.planning.expectation import FORMULA, PROMPT_FLOPS_SHARE
from soloist.planning.hardware import Hardware, find_hardware, from_driver_name, names
from soloist.planning.model import Model, active_parameters
from soloist.planning.precision import PRECISIONS, find_precision
from soloist.planning.reach import GPU_COUNTS, Reach, Subject, count, reaches
from soloist.planning.reading import read_model
from soloist.planning.speculation import read_speculation
from soloist.settings import read_settings

# Positions in sight where nothing else is asked for; a shorter model has its own.
DEFAULT_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Asked:
    """The options, as they were given.

    Attributes:
        model: a folder, a hub id or a shipped model; unused with a file.
        file: a config.json, or None.
        hardware: a name of the table; None detects this machine's GPU.
        context: tokens in sight of every step, or None.
        gpus, precision: one row's, or None for all.
        revision: of a hub model.
        draft: a model that drafts, or its config.json; None looks drafts up.
        drafts, acceptance: a round; None for what is usual.
        price: of one GPU an hour; None for no costs.
        utilisation: share of the paid hours.
        step: PROMPT/NEW, tokens.
        api_price: PROMPT/NEW, or None.
        accepted_fields: of the configuration, that nobody knows.
        kv: what keys and values are stored as; None for 16 bits.
    """

    model: str
    file: Path | None
    hardware: str | None
    context: int | None
    gpus: int | None
    precision: str | None
    revision: str | None
    draft: str | None
    drafts: int | None
    acceptance: float | None
    price: float | None
    utilisation: float
    step: str
    api_price: str | None
    accepted_fields: tuple[str, ...] = ()
    kv: KvName | None = None


def show(asked: Asked, *, as_json: bool) -> None:
    """Print what the hardware can reach for the model.

    Raises:
        UserError: the model, the hardware or another option cannot be used.
        DeviceError: no known GPU was found, or the model does not fit.
    """
    if asked.gpus is not None and asked.gpus not in GPU_COUNTS:
        raise SettingError("--gpus", asked.gpus, ", ".join(str(n) for n in GPU_COUNTS))
    precisions = PRECISIONS if asked.precision is None else (find_precision(asked.precision),)
    name, model = _read(asked.model, asked.file, asked.revision, asked.accepted_fields)
    model = _with_kv(model, asked.kv)
    most = model.context_tokens
    tokens = min(DEFAULT_CONTEXT_TOKENS, most) if asked.context is None else asked.context
    if not 1 <= tokens <= most:
        raise SettingError("--context", tokens, f"1 … {most:,}")
    costs = _costs(asked)
    draft = None if asked.draft is None else _read_draft(asked.draft)
    speculation = read_speculation(draft, asked.drafts, asked.acceptance)
    target = detect() if asked.hardware is None else find_hardware(asked.hardware)
    subject = Subject(model, target, tokens, speculation)
    rows = reaches(subject, precisions, GPU_COUNTS if asked.gpus is None else (asked.gpus,))
    if as_json:
        print_json(_facts(name, subject, rows, costs))
    else:
        _show_words(name, subject, rows, costs)


def _with_kv(model: Model, name: KvName | None) -> Model:
    """The same with keys and values stored so."""
    if name is None:
        return model
    if model.config is None:
        raise SettingError("--kv", name, "only for families that Soloist runs", "leave out --kv")
    return replace(model, kv=kv_format(name, model.config, Dtype.BF16))


def _costs(asked: Asked) -> Costs | None:
    if asked.price is None:
        return None
    api = None if asked.api_price is None else read_api_prices(asked.api_price)
    return Costs(read_machine(asked.price, asked.utilisation), read_work(asked.step), api)


def _read_draft(given: str) -> Model:
    """A model, or a config.json."""
    file = Path(given)
    return _read(given, file if file.is_file() else None, None)[1]


def detect() -> Hardware:
    """This machine's first GPU, by the driver's name for it.

    Raises:
        HardwareNotDetected: there is no driver or GPU, or no figures for it.
    """
    try:
        cuda = driver()
    except CudaMissing as error:
        raise HardwareNotDetected(f"no GPU was found: {error.message}", names()) from error
    status, found = cuda.cuInit(0)[0], 0
    if status == cuda.CUresult.CUDA_SUCCESS:
        status, found = cuda.cuDeviceGetCount()
    if status != cuda.CUresult.CUDA_SUCCESS or found == 0:
        raise HardwareNotDetected("the NVIDIA driver shows no GPU", names())
    _, given = cuda.cuDeviceGetName(128, cuda.cuDeviceGet(0)[1])
    return from_driver_name(given.split(b"\0")[0].decode())


def _read(
    model: str, file: Path | None, revision: str | None, accepted: tuple[str, ...] = ()
) -> tuple[str, Model]:
    """The model's name and sizes; of a hub model only its configuration is fetched."""
    if file is not None:
        _require_configuration(file)
        name = file.resolve().parent.name if file.name == CONFIG_FILE else file.stem
        return name, read_model(file, accepted)
    offline = read_settings().hub_offline
    folder = find_model(model, revision=revision, offline=offline, wanted=(CONFIG_FILE,))
    return folder.name, read_model(config_file(folder), accepted)


def _require_configuration(file: Path) -> None:
    if file.is_dir():
        raise SettingError(
            "--config", str(file), "a config.json",
            f"give {file / CONFIG_FILE}, or the folder without --config",
        )  # fmt: skip
    if not file.exists():
        raise SettingError(
            "--config", str(file), "a config.json that exists",
            "check the path; a model on the hub needs no file: soloist plan OWNER/NAME",
        )  # fmt: skip


def _show_words(name: str, subject: Subject, rows: Sequence[Reach], costs: Costs | None) -> None:
    h, first = subject.hardware, rows[0]
    flops = "FLOP/s not stated" if h.flops is None else f"{h.flops / 1e12:,.4g} TFLOP/s 16-bit"
    rate = h.link.bytes_per_s
    link = h.link.name + (f" {rate / 1e9:,.0f} GB/s a direction" if rate else "")
    kept = "" if subject.model.kv.is_plain else f" in {subject.model.kv.name}"
    active = ""
    if subject.model.mixture is not None:
        active = f" ({millions(active_parameters(subject.model))} for a token)"
    say(
        f"{name} · {subject.model.family} · {millions(parameters(subject.model.specs))} parameters"
        f"{active} · context {subject.context_tokens:,}: KV cache{kept} {gigabytes(first.kv_bytes)}"
    )
    print(
        f"{h.name}{' (announced)' if h.announced else ''} · {gigabytes(h.memory_bytes)} · "
        f"{h.bandwidth / 1e12:.4g} TB/s · {flops} · {link} · {h.source}"
    )
    print("bytes over all GPUs, speeds in tokens/s of one request")
    show_table(
        ("weights", "GPUs", "held", "read a token", "fits", "at most", "expected", "speculating",
         "first wall", "runs today"),
        [_cells(row) for row in rows],
    )  # fmt: skip
    for line in remarks(subject, rows):
        print(line)
    if costs is not None:
        _show_costs(subject, rows, costs)


def _show_costs(subject: Subject, rows: Sequence[Reach], costs: Costs) -> None:
    """What tokens and steps cost on each combination that fits, the arithmetic below."""
    fitting = [(row, bill(subject, row, costs)) for row in rows if row.fits]
    work, machine = costs.work, costs.machine
    print(
        f"cost · a GPU {machine.price_per_hour:g} an hour, answering {machine.utilisation:.0%} of "
        f"the time · a step reads {work.prompt_tokens:,} and makes {work.new_tokens:,} tokens"
    )
    show_table(
        ("weights", "GPUs", "an hour", "1,000 tokens", "a step s", "a step", "speculating",
         "by the API"),
        [
            (
                row.precision.name, str(row.gpus), f"{b.machine.price_per_hour:g}",
                _money(b.thousand_tokens), _money(b.step_s), _money(b.step),
                _money(b.step_speculating), _money(b.api_step),
            )
            for row, b in fitting
        ],
    )  # fmt: skip
    row, b = fitting[0]
    speed = 1 / row.expected.token_s
    print(
        f"1,000 tokens, {row.precision.name} on {count(row.gpus)}: 1000 / {figure(speed)} tokens/s "
        f"× {b.machine.price_per_hour:g} an hour / 3600 / {machine.utilisation:g} = "
        f"{_money(b.thousand_tokens)}"
    )
    if b.read_s is not None:
        print(
            f"a step: {b.read_s:.3g} s to read {work.prompt_tokens:,} tokens + {work.new_tokens:,} "
            f"/ {figure(speed)} tokens/s = {_money(b.step_s)} s, × the same price = "
            f"{_money(b.step)}; reading is expected at {PROMPT_FLOPS_SHARE:.0%} of peak FLOP/s"
        )
    if costs.api is not None and b.api_step is not None:
        print(
            f"by the API: {work.prompt_tokens:,} × {costs.api.prompt:g} + {work.new_tokens:,} × "
            f"{costs.api.new:g} a million = {_money(b.api_step)}"
        )


def _money(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _cells(row: Reach) -> tuple[str, ...]:
    fits = "yes" if row.fits else f"no: {gigabytes(row.missing_bytes)} a GPU short"
    limit = expected = speculating = "–"
    if row.fits:
        limit = figure(row.limit_tokens_per_s)
        if row.speculating is not None:
            speculating = figure(row.speculating.tokens_per_s) + " (assumed)"
        expected = figure(1 / row.expected.token_s) + ("" if row.measured else " (assumed)")
    return (
        row.precision.name,
        str(row.gpus),
        gigabytes(row.weights_bytes),
        gigabytes(row.bytes_per_token),
        fits,
        limit,
        expected,
        speculating,
        row.wall.value,
        f"no: {row.obstacle}" if row.obstacle else "yes" if row.fits else "–",
    )


def _facts(
    name: str, subject: Subject, rows: Sequence[Reach], costs: Costs | None
) -> dict[str, object]:
    h, s = subject.hardware, subject.speculation
    return {
        "model": name,
        "family": subject.model.family,
        "parameters": parameters(subject.model.specs),
        "active_parameters": active_parameters(subject.model),
        "is_text_part": subject.model.is_part,
        "context_tokens": subject.context_tokens,
        "kv": subject.model.kv.name,
        "hardware": {
            "name": h.name,
            "announced": h.announced,
            "memory_bytes": h.memory_bytes,
            "bandwidth_bytes_per_s": h.bandwidth,
            "dense_16_bit_flops": h.flops,
            "link": h.link.name,
            "link_bytes_per_s": h.link.bytes_per_s,
            "source": h.source,
        },
        "formula": FORMULA,
        "basis": basis(subject, rows),
        "speculation": None
        if s is None
        else {
            "drafts": s.drafts,
            "acceptance": s.acceptance,
            "acceptance_from": "assumed" if s.is_assumed else "given",
            "tokens_per_round": s.tokens_per_round,
            "draft_parameters": 0 if s.draft is None else parameters(s.draft.specs),
            "draft_bytes": subject.draft_bytes,
        },
        "costs": None if costs is None else asdict(costs),
        "rows": [
            {
                "precision": row.precision.name,
                "gpus": row.gpus,
                "weights_bytes": row.weights_bytes,
                "kv_bytes": row.kv_bytes,
                "bytes_per_token": row.bytes_per_token,
                "fits": row.fits,
                "missing_bytes_per_gpu": row.missing_bytes,
                "limit_tokens_per_s": round(row.limit_tokens_per_s, 1),
                "expected_tokens_per_s": round(1 / row.expected.token_s, 1),
                "speculating_tokens_per_s": None
                if row.speculating is None
                else round(row.speculating.tokens_per_s, 1),
                "expected_from": "measured" if row.measured else "assumed",
                "stream_s": row.expected.stream_s,
                "wait_s": row.expected.wait_s,
                "compute_s": row.expected.compute_s,
                "first_wall": row.wall.value,
                "runs": not row.obstacle,
                "obstacle": row.obstacle,
                "cost": None if costs is None else asdict(bill(subject, row, costs)),
            }
            for row in rows
        ],
    }


def figure(tokens_per_s: float) -> str:
    """Three digits: more would promise what no plan can."""
    digits = max(0, len(str(int(tokens_per_s))) - 3)
    return f"{round(tokens_per_s, -digits):,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"
