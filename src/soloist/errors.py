"""Every error that Soloist raises on purpose.

    SoloistError
    ├── UserError             something given to Soloist cannot be used
    │   ├── ConfigError       config.json: MissingField · WrongType · UnsupportedField
    │   │                     UnknownField · NotAcceptable
    │   │                     UnknownFamily · UnsupportedQuantization · GroupMismatch
    │   │                     UnsupportedAdapter
    │   ├── CheckpointError   model files: ModelNotFound · MissingFile · NotAModel · TruncatedFile
    │   │                     MissingTensor · UnexpectedTensor · WrongShape · NotFinite
    │   │                     NotAFile · IndexMismatch · QuantizationMismatch · NoGroupFits
    │   │                     AlreadyQuantized · DownloadFailed · AdapterNotFound
    │   │                     AdapterMismatch · AdapterOnCodes · BadGguf · UnsupportedGguf
    │   │                     GgufChoice
    │   ├── TokenizerError    tokenizer files and chat templates
    │   ├── RequestError      one request: EmptyPrompt · PromptTooLong · BadSampling
    │   │                     BadTokenId · BadLogits · BadGrammar · GrammarFailed
    │   │                     StepFailed · PredictionTooLong
    │   ├── SettingError      options and environment
    │   ├── KvUnsupported     --kv on a GPU
    │   ├── NotDeployable     models and machines of a cluster
    │   └── UnknownHardware   hardware without figures
    ├── Unavailable           the engine takes no request now: QueueFull · ShuttingDown
    │                         EngineStopped · PreparationFailed
    └── DeviceError           the machine cannot do it: OutOfMemory · DoesNotFit
                              HardwareNotDetected · DeviceMissing · CudaMissing · CompileError
                              BadInclude · LaunchError · GpuUnsupported · GpusMissing
                              NothingToCompile
                              RanksUnsupported · NoPeerAccess · ShapeUnsupported · KernelStuck
                              MemoryNotFreed · Stalled · EndForced · RunFailed · ServerFailed
                              BitsDiffer · DiskFull · NotWritten
                              DeployFailed

Classes take facts and build the sentence: what was given, what is allowed, then a hint.
"""

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

# Of an adapter that Soloist does not merge.
_MERGE_WITH_PEFT: Final = (
    "merge the adapter into its model with the package peft: PeftModel.from_pretrained(model, "
    "adapter).merge_and_unload().save_pretrained(FOLDER); copy the tokenizer's files to FOLDER, "
    "and give FOLDER as the model"
)


class SoloistError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        exit_status: of a process that ends with the error.

    Args:
        message: what was given and what is allowed, one paragraph. Characters that would steer a
            terminal are made visible.
        hint: what to do about it, one sentence; empty only where nothing can be done.
    """

    exit_status: ClassVar[int] = 2

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = visible(message), visible(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class UserError(SoloistError):
    """Something given to Soloist cannot be used."""


class DeviceError(SoloistError):
    """The machine cannot do what was asked."""

    exit_status = 3


class Unavailable(SoloistError):
    """The engine takes no request now; a later request, or another server, may succeed."""

    exit_status = 3


# --- config.json ---------------------------------------------------------------------------------


class ConfigError(UserError):
    """A configuration file cannot be read or asks for something that is not supported."""


class MissingField(ConfigError):
    """A field without which the model's function is unknown is absent."""

    def __init__(self, file: str, field: str, expected: str) -> None:
        super().__init__(
            f"{file} has no field {quoted(field)} (expected {expected})",
            "the checkpoint is incomplete or in an older format; download the file again, or use a "
            "newer checkpoint",
        )
        self.field = field


class WrongType(ConfigError):
    """A field holds a value of the wrong type or outside its range."""

    def __init__(self, file: str, field: str, value: object, expected: str) -> None:
        super().__init__(
            f"{file}: field {quoted(field)} is {shortened(value)}, expected {expected}",
            "correct the file, or download it again",
        )
        self.field = field


class UnsupportedField(ConfigError):
    """A field changes what the model computes in a way Soloist does not implement."""

    def __init__(self, file: str, field: str, value: object, allowed: str, family: str) -> None:
        super().__init__(
            f"{file}: field {quoted(field)} is {shortened(value)}, which the family "
            f"{quoted(family)} does not implement (allowed: {allowed})",
            "ignoring the field would change the model's output, so --accept-field does not accept "
            "it; use a checkpoint without it, or implement it in the family "
            "(docs/adding-a-model.md)",
        )
        self.field = field


class UnknownField(UnsupportedField):
    """A field that the reader of a family does not know, and that nobody accepted."""

    def __init__(self, file: str, field: str, value: object, family: str) -> None:
        option = _cut(shlex.quote(visible(field)), 160)
        ConfigError.__init__(
            self,
            f"{file}: field {quoted(field)} is {shortened(value)}, and the reader of the family "
            f"{quoted(family)} does not know it (allowed: absent)",
            "it may change the model's output; if you know that it does not, add "
            f"--accept-field {option}",
        )
        self.field = field


class NotAcceptable(ConfigError):
    """A field is to be accepted that was not refused as unknown."""

    def __init__(self, file: str, field: str) -> None:
        super().__init__(
            f"--accept-field {quoted(field)}: {file} has no such field, or Soloist knows it "
            "(allowed: a field that is refused because Soloist does not know it)",
            "leave the option out; a field inside another is named as in the refusal, such as "
            "rope_scaling.NAME",
        )
        self.field = field


class UnknownFamily(ConfigError):
    """`model_type` names no family that Soloist knows."""

    def __init__(self, file: str, model_type: str, supported: Iterable[str]) -> None:
        super().__init__(
            f"{file}: model_type {quoted(model_type)} is not supported "
            f"(supported: {', '.join(sorted(supported))})",
            "use a model of a supported family, or add the family (docs/adding-a-model.md)",
        )
        self.model_type = model_type


class UnsupportedQuantization(UnsupportedField):
    """Weights are quantised in a way that Soloist does not read."""

    def __init__(self, file: str, field: str, value: object, allowed: str) -> None:
        ConfigError.__init__(
            self,
            f"{file}: field {quoted(field)} is {shortened(value)}, a quantisation that Soloist "
            f"does not read (allowed: {allowed})",
            "use the model's 16-bit checkpoint or one quantised in a format that docs/formats.md "
            "lists, such as FP8, AWQ, GPTQ or compressed-tensors",
        )
        self.field = field


class GroupMismatch(ConfigError):
    """Rows or columns of a matrix do not divide into groups of numbers that are stored together."""

    def __init__(self, module: str, scheme: str, group: int, what: str, count: int) -> None:
        super().__init__(
            f"{quoted(module)} has {count:,} {what}, which {scheme} stores in groups of {group} "
            f"(allowed: a multiple of {group})",
            "config.json and the weights are from different models, or group_size was changed; "
            "take both from one checkpoint",
        )


class UnsupportedAdapter(UnsupportedField):
    """An adapter changes a model in a way that Soloist does not merge."""

    def __init__(self, file: str, field: str, value: object, allowed: str) -> None:
        ConfigError.__init__(
            self,
            f"{file}: field {quoted(field)} is {shortened(value)}, which Soloist does not merge "
            f"(allowed: {allowed})",
            _MERGE_WITH_PEFT,
        )
        self.field = field


# --- model files ---------------------------------------------------------------------------------


class CheckpointError(UserError):
    """The files of a model are absent, damaged or do not fit its configuration."""


class ModelNotFound(CheckpointError):
    """A model was named that is no folder, no file, no hub id and none that ships with Soloist."""

    def __init__(self, given: str, shipped: Iterable[str]) -> None:
        super().__init__(
            f"no model '{given}': it is neither a folder nor a GGUF file on this machine, nor a "
            f"hub id of the form 'owner/name', nor shipped with Soloist "
            f"({', '.join(sorted(shipped))})",
            "check the path, or give a folder that holds config.json and *.safetensors, or a GGUF "
            "file",
        )


class MissingFile(CheckpointError):
    """A file that the model needs is not in its folder."""

    def __init__(self, folder: str, wanted: str, found: Sequence[str], hint: str = "") -> None:
        names = [_cut(visible(name, kept=""), 80) for name in found[:8]]
        shown = ", ".join(names) + (", …" if len(found) > 8 else "")
        super().__init__(
            f"{folder} holds no {wanted} (it holds: {shown})"
            if found
            else f"{folder} is empty; a model folder holds {wanted}",
            hint or "download the model again, or point to the folder that holds its files",
        )


class NotAModel(CheckpointError):
    """A folder holds a part of a model, or a model in a form that is not read."""


class NotAFile(CheckpointError):
    """A file's name belongs to a folder, a pipe, a socket or a device."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(
            f"{path} is {kind} (allowed: a file)",
            "put the file in its place; of a pipe, save what it delivers to a file first",
        )


class IndexMismatch(CheckpointError):
    """The index of a checkpoint says that tensors are where they are not."""

    def __init__(self, index: str, names: Sequence[str], told: str, seen: str) -> None:
        more = len(names) - 1
        others = f", and likewise {more:,} more" if more else ""
        super().__init__(
            f"{index} says that tensor {quoted(names[0])} is in {told}, but {seen}{others}",
            "index and weights are of different checkpoints; download the model again into an "
            "empty folder",
        )


class TruncatedFile(CheckpointError):
    """A file is shorter than its own header says, or has no readable header."""

    def __init__(self, file: str, detail: str) -> None:
        super().__init__(
            f"{file} is damaged: {detail}",
            "the download or copy was probably cut off; download this file again",
        )


class MissingTensor(CheckpointError):
    """The checkpoint lacks a tensor that the configuration calls for."""

    def __init__(
        self, folder: str, names: Sequence[str], described_by: str = "config.json"
    ) -> None:
        super().__init__(
            f"{folder} lacks {len(names)} tensor{'s' * (len(names) > 1)} that {described_by} calls "
            f"for: {_listed(names)}",
            f"{described_by} and the weights are from different models, or a shard is missing; "
            "download the model again",
        )


class UnexpectedTensor(CheckpointError):
    """The checkpoint holds a tensor that the configuration does not account for."""

    def __init__(
        self, folder: str, names: Sequence[str], described_by: str = "config.json"
    ) -> None:
        super().__init__(
            f"{folder} holds {len(names)} tensor{'s' * (len(names) > 1)} that {described_by} does "
            f"not account for: {_listed(names)}",
            f"ignoring these tensors would change the model's output; check that {described_by} "
            "belongs to these weights",
        )


class WrongShape(CheckpointError):
    """A tensor's shape contradicts the configuration."""

    def __init__(
        self,
        tensor: str,
        seen: Sequence[int],
        wanted: Sequence[int],
        described_by: str = "config.json",
    ) -> None:
        super().__init__(
            f"tensor {quoted(tensor)} has shape {list(seen)}, {described_by} calls for "
            f"{list(wanted)}",
            f"{described_by} and the weights are from different models; take both from one "
            "checkpoint",
        )


class QuantizationMismatch(CheckpointError):
    """A matrix is stored in another way than the quantisation's configuration says."""

    def __init__(self, tensor: str, seen: str, wanted: str) -> None:
        super().__init__(
            f"{quoted(tensor)} is stored with {seen}, but quantization_config calls for {wanted}",
            "config.json and the weights are from different checkpoints, or one of them was edited;"
            " download the model again",
        )


class NotFinite(CheckpointError):
    """A tensor holds NaN or infinite values."""

    def __init__(self, tensor: str, count: int, total: int) -> None:
        super().__init__(
            f"tensor {quoted(tensor)} holds {count:,} NaN or infinite values among {total:,}",
            "the file is damaged or its conversion overflowed; download or convert the file again",
        )


class NoGroupFits(CheckpointError):
    """A row of a matrix does not divide into groups that share a scale."""

    def __init__(self, tensor: str, columns: int, groups: Sequence[int]) -> None:
        listed = " or ".join(", ".join(map(str, groups)).rsplit(", ", 1))
        super().__init__(
            f"tensor {quoted(tensor)} has rows of {columns:,} numbers, which do not divide into "
            f"groups of {listed} for int4 (allowed: a multiple of {min(groups)})",
            "choose int8 or fp8, which have one scale a row",
        )


class AlreadyQuantized(CheckpointError):
    """A checkpoint that is to be quantised is no plain 16-bit one."""

    def __init__(self, folder: str, seen: str) -> None:
        super().__init__(
            f"{folder} is quantised already ({seen}); only a checkpoint in bf16 or fp16 can be "
            "quantised",
            "use the 16-bit checkpoint that this one was made from",
        )


class BadGguf(CheckpointError):
    """A GGUF file contradicts itself."""

    def __init__(self, file: str, detail: str, hint: str = "") -> None:
        super().__init__(
            f"{file} cannot be read as GGUF: {detail}",
            hint or "the file is damaged or was made by a broken tool; download it again",
        )


class UnsupportedGguf(CheckpointError):
    """A GGUF file holds something that Soloist does not read."""

    def __init__(self, file: str, what: str, given: str, allowed: str, hint: str = "") -> None:
        super().__init__(
            f"{file}: {what} is {given}, which Soloist does not read (allowed: {allowed})",
            hint
            or "get another GGUF file of this model, such as Q4_K_M or Q8_0, or its safetensors "
            "checkpoint",
        )


class GgufChoice(CheckpointError):
    """Several GGUF models, or none, are what was asked for."""

    def __init__(
        self, where: str, tag: str | None, meant: Sequence[str], names: Sequence[str], example: str
    ) -> None:
        listed = _listed(meant or names, 12) or "nothing"
        if meant and tag is not None:
            said = f"{quoted(tag)} means {len(meant)} GGUF models of {where}: {listed}"
        elif tag is not None:
            said = f"{where} holds no GGUF model {quoted(tag)} (it holds: {listed})"
        else:
            said = f"{where} holds {len(names)} GGUF models (allowed: one): {listed}"
        choice = _cut(visible(f"{where}:{example}", kept=""), 160)
        super().__init__(
            said,
            f"say which, with a part of its name or all of it after a colon, such as {choice}"
            if names
            else "give a folder or a repository with GGUF files",
        )


class DownloadFailed(CheckpointError):
    """A model could not be fetched from the hub."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            f"cannot fetch '{model}' from the hub: {reason}",
            "check the name, the network and, for gated models, `hf auth login`; or give a local "
            "folder",
        )


class AdapterNotFound(CheckpointError):
    """An adapter was named that is neither a folder nor a hub id."""

    def __init__(self, given: str) -> None:
        super().__init__(
            f"no adapter '{given}': it is neither a folder on this machine nor a hub id of the "
            "form 'owner/name'",
            "give the folder that holds adapter_config.json and adapter_model.safetensors",
        )


class AdapterMismatch(CheckpointError):
    """The files of an adapter contradict each other, or belong to another model.

    Args:
        file: one of them.
        seen: what it holds, and what is allowed.
        base: the model that the adapter names as its own; may be empty.
    """

    def __init__(self, file: str, seen: str, base: str) -> None:
        trained = f": {quoted(base)}, as its configuration says" if base else ""
        super().__init__(
            f"{file}: {seen}",
            f"give the model that the adapter was trained on{trained}; if this is the model, "
            "download or save the adapter again",
        )


class AdapterOnCodes(CheckpointError):
    """An adapter changes a matrix that is quantised."""

    def __init__(self, adapter: str, tensor: str, scheme: str) -> None:
        super().__init__(
            f"the adapter {adapter} changes {quoted(tensor)}, which the model stores as {scheme}; "
            "after a merge it would have to be rounded again (allowed: matrices in 16 or 32 bits)",
            "give the 16-bit checkpoint that the model was made from; with --weights it is rounded "
            "after the merge",
        )


class TokenizerError(UserError):
    """A tokenizer or chat template is absent, damaged or cannot do what was asked."""


# --- one request ---------------------------------------------------------------------------------


class RequestError(UserError):
    """One request cannot be served; the engine goes on."""


class EmptyPrompt(RequestError):
    """A prompt without a single token."""

    def __init__(self) -> None:
        super().__init__(
            "the prompt is empty: generation needs at least one token to start from",
            "give some text, for example 'def main():'",
        )


class PromptTooLong(RequestError):
    """Prompt and requested tokens do not fit the context."""

    def __init__(
        self,
        prompt_tokens: int,
        new_tokens: int,
        context_tokens: int,
        *,
        is_least: bool = False,  # more of them were not counted
    ) -> None:
        room = context_tokens - prompt_tokens
        fits = context_tokens - (new_tokens if new_tokens < context_tokens else 1)
        count = f"at least {prompt_tokens:,}" if is_least else f"{prompt_tokens:,}"
        super().__init__(
            f"the prompt has {count} tokens and the request asks for {new_tokens:,} new tokens, "
            f"but the context holds {context_tokens:,}; the prompt was not truncated",
            f"ask for at most {room:,} new tokens"
            if room > 0
            else f"shorten the prompt to at most {fits:,} tokens, or raise --context "
            "if the model allows it",
        )
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.context_tokens = context_tokens


class PredictionTooLong(RequestError):
    """A predicted text is longer than any answer could be."""

    def __init__(self, num_tokens: int, context_tokens: int, *, is_least: bool = False) -> None:
        count = f"at least {num_tokens:,}" if is_least else f"{num_tokens:,}"
        super().__init__(
            f"the prediction has {count} tokens, but the context holds {context_tokens:,}",
            "predict only the text that the answer will repeat",
        )


class BadSampling(RequestError):
    """A sampling value is out of range, or two of them contradict each other."""

    def __init__(self, field: str, value: object, allowed: str, hint: str = "") -> None:
        super().__init__(
            f"{field} is {value!r} (allowed: {allowed})", hint or f"set {field} to an allowed value"
        )
        self.field = field


class BadTokenId(RequestError):
    """A token id outside the vocabulary."""

    def __init__(self, field: str, token_id: int, vocab_size: int) -> None:
        super().__init__(
            f"{field}: token id {token_id} is outside the vocabulary (0 … {vocab_size - 1})",
            "each tokenizer has its own ids; use the ids of this model's tokenizer",
        )
        self.field = field


class BadLogits(RequestError):
    """No token can be chosen: the largest logit is NaN or infinite."""

    def __init__(self, position: int, best: float) -> None:
        super().__init__(
            f"the largest logit for position {position} is {best} (allowed: any finite number); "
            "no token can be chosen",
            "the model's activations overflowed, or logit_bias and min_tokens exclude every token",
        )


class BadGrammar(RequestError):
    """A schema, pattern or grammar for the answer that is invalid or not supported."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the schema, pattern or grammar cannot be compiled: {reason}",
            "simplify it or leave it out; docs/structured-output.md says what is supported",
        )


class GrammarFailed(RequestError):
    """An answer can no longer match its schema or grammar."""

    def __init__(self, num_tokens: int, reason: str) -> None:
        super().__init__(
            f"after {num_tokens} tokens the answer can no longer match the schema or "
            f"grammar: {reason}",
            "loosen the schema or grammar, or remove stop tokens that it needs",
        )
        self.num_tokens, self.reason = num_tokens, reason


class StepFailed(RequestError):
    """A step of the engine failed on the host's side; other requests go on.

    The message names only the type of the cause: its text may hold data of another request.
    """

    def __init__(self, step: str, cause: BaseException) -> None:
        super().__init__(
            f"{step} failed: {type(cause).__name__}; this request was aborted, the engine runs on",
            "try again; if the request fails again, report the error from the server's log",
        )
        self.step = step


# --- no request now ------------------------------------------------------------------------------


class QueueFull(Unavailable):
    """The queue holds as many requests as it may."""

    def __init__(self, max_running: int, most_waiting: int, retry_s: float) -> None:
        super().__init__(
            f"the queue is full (allowed: {most_waiting} waiting requests beside {max_running} "
            "running ones); this request was not accepted",
            f"try again in about {retry_s:.0f} s, or start the server with a larger --queue",
        )
        self.retry_s = retry_s


class ShuttingDown(Unavailable):
    """The engine finishes what it has and then ends."""

    def __init__(self) -> None:
        super().__init__(
            "the server is shutting down and accepts no more requests",
            "send the request to another server, or try again after a restart",
        )


class PreparationFailed(Unavailable):
    """The process that parses and tokenizes requests does not run."""

    def __init__(self, status: int | None) -> None:
        told = "did not answer" if status is None else f"ended with status {status}"
        super().__init__(
            f"the process that parses and tokenizes requests {told}",
            "try again; if it fails again, read the server's log, and check that memory is free",
        )


class EngineStopped(Unavailable):
    """The thread that owns the device ended with an error."""

    def __init__(self, cause: BaseException) -> None:
        told = cause.message if isinstance(cause, SoloistError) else repr(cause)
        hint = cause.hint if isinstance(cause, SoloistError) else ""
        super().__init__(
            told if isinstance(cause, EngineStopped) else f"the engine stopped: {told}",
            hint or "restart the server; its log has the details",
        )


# --- options and environment ---------------------------------------------------------------------


class SettingError(UserError):
    """An option or an environment variable holds an unusable value."""

    def __init__(self, setting: str, value: object, allowed: str, hint: str = "") -> None:
        super().__init__(
            f"{setting} is {value!r} (allowed: {allowed})",
            hint or f"set {setting} to an allowed value",
        )


class KvUnsupported(UserError):
    """The decode kernel would run a model, but not with keys and values in these codes."""

    def __init__(self, given: str, reason: str, *, wants_bf16: bool) -> None:
        super().__init__(
            f"--kv is {given!r}, but {reason}",
            "take --precision bf16, or leave out --kv" if wants_bf16 else "leave out --kv",
        )


class NotDeployable(UserError):
    """What was asked of a cluster, in a file or of its machines, cannot be."""


class UnknownHardware(UserError):
    """A GPU was named for which there are no figures, or that is not clear."""

    def __init__(self, given: str, known: Iterable[str]) -> None:
        super().__init__(
            f"no figures for hardware '{given}' (known: {', '.join(known)})",
            "name one of these with --hardware",
        )


# --- the machine ---------------------------------------------------------------------------------


class OutOfMemory(DeviceError):
    """The model does not fit; nothing was allocated yet."""

    def __init__(self, needed: str, needed_bytes: int, available_bytes: int, fits: str) -> None:
        super().__init__(
            f"{needed} needs {gigabytes(needed_bytes)} but {gigabytes(available_bytes)} is "
            "available; nothing was allocated",
            fits,
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class DoesNotFit(DeviceError):
    """No way to store the model that was asked for fits the hardware."""

    def __init__(
        self, what: str, where: str, needed_bytes: int, memory_bytes: int, fits: str
    ) -> None:
        super().__init__(
            f"{what} does not fit: it needs {gigabytes(needed_bytes)} on {where}, "
            f"{gigabytes(needed_bytes - memory_bytes)} more than a GPU's {gigabytes(memory_bytes)}",
            fits,
        )


class HardwareNotDetected(DeviceError):
    """This machine's GPU is not one with figures to plan with."""

    def __init__(self, reason: str, known: Iterable[str]) -> None:
        super().__init__(
            f"{reason} (known hardware: {', '.join(known)})",
            "name one of these with --hardware",
        )


class DeviceMissing(DeviceError):
    """A device was asked for that this machine does not have."""

    def __init__(self, given: str, available: Iterable[str], hint: str = "") -> None:
        super().__init__(
            f"device '{given}' is not available here (available: {', '.join(available)})",
            hint or "leave --device out to use the best available one",
        )


class CudaMissing(DeviceError):
    """A part of CUDA that compiling or launching needs is not on this machine."""

    def __init__(self, part: str, reason: str, hint: str) -> None:
        super().__init__(f"{part} cannot be used: {reason}", hint)


class CompileError(DeviceError):
    """A kernel does not compile, or what came out is not what was meant."""

    def __init__(self, what: str, reason: str, log: str) -> None:
        quoted = "\n\n" + textwrap.indent(log, "    ") if log else ""
        super().__init__(
            f"{what}: {reason}{quoted}",
            "this is a bug in Soloist's kernels, or in an untested compiler version; report it "
            "with the lines above",
        )


class BadInclude(DeviceError):
    """A CUDA file asks for a file that is not one of the CUDA sources."""

    def __init__(self, includer: str, target: str, reason: str) -> None:
        super().__init__(
            f"{includer} names {target}: {reason}",
            'write #include "folder/file.cuh", relative to the root of the CUDA sources',
        )


class LaunchError(DeviceError):
    """The driver cannot load or start a kernel."""

    def __init__(self, what: str, reason: str, hint: str = "") -> None:
        super().__init__(
            f"{what} failed: {reason}",
            hint
            or "an earlier kernel may have caused this error; if a new process fails in the same "
            "way, update the NVIDIA driver",
        )


class GpuUnsupported(DeviceError):
    """The GPU is older than what the kernel is written for."""

    def __init__(self, capability: str) -> None:
        super().__init__(
            f"the decode kernel does not support compute capability {capability} "
            "(allowed: 8.0 and later)",
            "use --device cpu",
        )


class GpusMissing(DeviceError):
    """More GPUs were asked for than this machine has of one kind."""

    def __init__(self, given: int, present: list[int]) -> None:
        super().__init__(
            f"{given} GPUs were requested, but this machine has {len(present)} of the same model",
            f"use --gpus auto, which chooses among GPUs {present}"
            if present
            else "leave --gpus out",
        )


class RanksUnsupported(DeviceError):
    """A model cannot be spread over so many GPUs."""

    def __init__(self, given: int, reason: str, fine: list[int]) -> None:
        counts = (
            ", ".join(map(str, fine)) or "none: only the reference implementation runs this model"
        )
        super().__init__(
            f"this model cannot run on {given} GPUs: {reason} (it can run on: {counts})",
            f"use --gpus {fine[-1]}" if fine else "leave --gpus out",
        )


class NoPeerAccess(DeviceError):
    """GPUs that are to run one model cannot reach each other's memory."""

    def __init__(self, given: list[int], group: list[int]) -> None:
        super().__init__(
            f"GPUs {given} do not all have access to each other's memory "
            f"(the largest group that does: {group})",
            f"use {len(group)} GPUs; `nvidia-smi topo -p2p r` shows which GPUs have access",
        )


class ShapeUnsupported(DeviceError):
    """The decode kernel cannot run a model of this shape."""

    def __init__(self, given: str, allowed: str) -> None:
        super().__init__(
            f"the decode kernel does not support {given} (allowed: {allowed})",
            "use --device cpu, or another model",
        )


class NothingToCompile(DeviceError):
    """Kernels were asked for of a model that the decode kernel does not run."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"nothing to compile: {reason}",
            "models that the decode kernel does not run are run by the reference implementation, "
            "which has no kernels; for a model in fp32 give --precision bf16 or fp16",
        )


class KernelStuck(DeviceError):
    """A block of the decode kernel made no progress for seconds; the GPU's context is lost."""

    def __init__(self, where: str, needs: str, seen: str) -> None:
        super().__init__(
            f"the decode kernel is stuck: {where} waits for {needs}; seen: {seen}",
            "restart, and please report this message: it is a bug in the kernel",
        )


class MemoryNotFreed(DeviceError):
    """A request has ended, but not all of its device memory could be freed."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            f"the engine could not free all memory of a request that ended: {cause!r}",
            "restart, and please report this message: it is a bug in the engine",
        )


class Stalled(DeviceError):
    """The engine's thread made no progress for as long as the operator allows."""

    exit_status = 4

    def __init__(self, age_s: float, step: str) -> None:
        super().__init__(
            f"the engine is stuck: no progress for {age_s:.0f} s while {step}",
            "restart the server; if a step may take this long on your machine, raise "
            "--stall-timeout",
        )


class EndForced(DeviceError):
    """The server was to shut down, and did not within its time limit."""

    exit_status = 5

    def __init__(self, bound_s: float) -> None:
        super().__init__(
            f"the server did not shut down within {bound_s:.1f} s; its process was ended by force",
            "the stack traces below show what each thread was doing",
        )


class RunFailed(DeviceError):
    """`soloist run` or `soloist serve`, started in a process of its own, ended with an error."""

    def __init__(self, told: str, program: str = "soloist run") -> None:
        message, _, hint = told.strip().partition("\n\nhint: ")
        reason = message.rpartition("error: ")[2] or "it printed no error"
        super().__init__(
            f"{program}, started in a separate process, failed: {reason}",
            hint or f"start the same model with {program} to see the full output",
        )


class ServerFailed(DeviceError):
    """A server that is to be measured cannot be reached, or does not answer as it should."""

    def __init__(self, url: str, reason: str, hint: str = "") -> None:
        super().__init__(
            f"{url}: {reason}", hint or "check the address, --api, --model and the server's own log"
        )


class DeployFailed(DeviceError):
    """Replicas on a cluster did not start, or not in time."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            reason, "`serve status` and the replicas' logs on Ray's dashboard say more"
        )


class BitsDiffer(DeviceError):
    """Two ways to make the same logits or tokens did not give the same bits."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(
            f"{what} differ at {where}; their bits must be the same",
            "please report this message: it is a bug in the kernel",
        )


class DiskFull(DeviceError):
    """Files do not fit the disk; nothing was written."""

    def __init__(self, folder: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"{folder} needs {gigabytes(needed_bytes)} but its disk has {gigabytes(free_bytes)} "
            "free; nothing was written",
            "free some space, or name a folder on another disk",
        )


class NotWritten(DeviceError):
    """The machine did not take what a command writes."""

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(
            f"{target} cannot be written: {reason}",
            "write to a file or folder that you may write to, on a disk with room",
        )


def gigabytes(num_bytes: int) -> str:
    """`num_bytes` for people, in decimal units: '1.34 TB', '12.8 GB', '640 MB', '3.1 kB'."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= 0.9995 * size:  # what three digits round to the larger unit
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(_cut(visible(name, kept=""), 160) for name in names[:most]) + more


def shortened(value: object) -> str:
    """A value of a file as Python writes it, in 80 characters at most."""
    return _cut(repr(value), 80)


def quoted(name: str) -> str:
    """A name out of a file, in quotes, on one line and in 160 characters at most."""
    return _cut(f"'{visible(name, kept='')}'", 160)


def visible(text: str, kept: str = "\n\t") -> str:
    """The text with characters that would steer a terminal written as Python writes them.

    Args:
        text: of any origin.
        kept: characters that stay as they are, printable or not.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
