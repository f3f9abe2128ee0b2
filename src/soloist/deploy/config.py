"""What is to run on a cluster: a YAML file of models, checked field by field."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from soloist.engine.config import EngineConfig
from soloist.errors import NotDeployable, SettingError
from soloist.model.kv_format import KvName
from soloist.model.quantized import AT_LOAD
from soloist.server.config import ServerConfig
from soloist.server.problems import path_of

Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Autoscaling(_Strict):
    """Between how many replicas a model has, and when there are more of them.

    Attributes:
        least, most: replicas.
        requests: that run and wait for each replica, on average; above, replicas are added.
        grow_after_s, shrink_after_s: for how long that has to be so.
    """

    least: int = Field(1, ge=1)
    most: int = Field(ge=1)
    requests: float = Field(2.0, gt=0)
    grow_after_s: float = Field(10.0, ge=0)
    shrink_after_s: float = Field(600.0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.most < self.least:
            msg = f"most is {self.most}, less than least, {self.least}"
            raise ValueError(msg)
        return self


class ModelSpec(_Strict):
    """One model and its replicas. Fields that `soloist serve` has as options mean the same.

    Attributes:
        model: a folder that every node has, a shipped model's name or a hub id.
        names: for clients; without them, `model`.
        replicas: how many; instead, `autoscaling`.
        gpus: for each replica, all of one node; 0 runs on the CPU.
        cpus: for each replica: cores that Ray keeps for it.
        affinity: whether requests go where their beginning is cached; else Ray's own choice, the
            less busy one of two replicas.
        imbalance: requests more than the least busy replica that one may run for the sake of what
            it has cached.
    """

    model: Name
    names: tuple[Name, ...] = ()
    replicas: int = Field(1, ge=1)
    autoscaling: Autoscaling | None = None
    gpus: Literal[0, 1, 2, 4, 8] = 1
    cpus: int = Field(2, ge=1)
    sequences: int = Field(8, ge=1, le=8)
    queue: int = Field(64, ge=0, le=100_000)
    affinity: bool = True
    imbalance: int = Field(2, ge=0)
    context: int | None = Field(None, ge=1)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    weights: Literal["int4", "int8", "fp8"] | None = None
    head_weights: Literal["int4", "int8", "fp8"] | None = None
    kv: KvName | None = None
    revision: Name | None = None
    prefix_cache: bool = True
    accept_fields: tuple[Name, ...] = ()

    @property
    def shown_names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return tuple(dict.fromkeys(self.names)) or (self.model,)

    @model_validator(mode="after")
    def _counted_once(self) -> Self:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            msg = "replicas and autoscaling are both given (allowed: one of them)"
            raise ValueError(msg)
        return self

    def engine(self) -> EngineConfig:
        """What each replica loads."""
        return EngineConfig(
            self.model,
            device="cuda" if self.gpus else "cpu",
            precision=self.precision,
            context_tokens=self.context,
            revision=self.revision,
            sequences=self.sequences,
            keeps_prefixes=self.prefix_cache,
            measures_bandwidth=True,
            gpus=max(1, self.gpus),
            weights=AT_LOAD.get(self.weights or ""),
            head_weights=AT_LOAD.get(self.head_weights or ""),
            kv=self.kv,
            accepted_fields=self.accept_fields,
        )


class Deployment(_Strict):
    """All that runs under one address.

    Attributes:
        models: the first one answers requests that name none.
        application: its name in Ray Serve.
        host, port: of the address; `proxies` says on which nodes it is open.
        ingresses: processes that read requests and pass streams on.
        api_key_file: a file of keys, one a line, on the machine from which one deploys.
        session_header: requests with the same value in it go to one replica, where possible.
        drain_timeout: seconds that running requests get when their replica is replaced.
    """

    models: tuple[ModelSpec, ...] = Field(min_length=1)
    application: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$")] = "soloist"
    host: Name = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    proxies: Literal["head", "every-node"] = "head"
    ingresses: int = Field(1, ge=1, le=1000)
    api_key_file: Path | None = None
    allowed_hosts: tuple[Name, ...] = ()
    cors_origins: tuple[Name, ...] = ()
    session_header: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,60}$")] = "x-session-id"
    max_body_mb: int = Field(32, ge=1, le=2048)
    request_timeout: float = Field(3600.0, ge=0.1, le=10**6)
    drain_timeout: float = Field(600.0, ge=0, le=10**6)

    @field_validator("models")
    @classmethod
    def _names_differ(cls, models: tuple[ModelSpec, ...]) -> tuple[ModelSpec, ...]:
        seen: dict[str, int] = {}
        for number, spec in enumerate(models):
            for name in spec.shown_names:
                if name in seen:
                    msg = (
                        f"models[{seen[name]}] and models[{number}] have the same name '{name}' "
                        "(allowed: names that differ; set names)"
                    )
                    raise ValueError(msg)
                seen[name] = number
        return models

    def api_keys(self) -> tuple[str, ...]:
        """Of the file.

        Raises:
            NotDeployable: it cannot be read, or holds none.
        """
        if self.api_key_file is None:
            return ()
        try:
            text = self.api_key_file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _bad(f"api_key_file '{self.api_key_file}' cannot be read: {error}") from error
        keys = tuple(line.strip() for line in text.splitlines() if line.strip())
        if not keys:
            raise _bad(f"api_key_file '{self.api_key_file}' holds no key (allowed: one a line)")
        return keys

    def server(self, spec: ModelSpec, replica: str) -> ServerConfig:
        """Of one replica; keys and origins are the ingress' business."""
        return ServerConfig(
            spec.shown_names,
            host="0.0.0.0",  # noqa: S104 - it listens nowhere, and any name may reach the ingress
            most_waiting=spec.queue,
            most_body_bytes=self.max_body_mb * 2**20,
            request_s=self.request_timeout,
            replica=replica,
        )

    def front(self) -> "Front":
        """What the ingress has to know.

        Raises:
            NotDeployable: keys cannot be read.
            SettingError: an origin or a name of a host is none.
        """
        names = tuple(spec.shown_names for spec in self.models)
        server = ServerConfig(
            tuple(name for those in names for name in those),
            host=self.host,
            api_keys=self.api_keys(),
            allowed_hosts=self.allowed_hosts,
            cors_origins=self.cors_origins,
            most_body_bytes=self.max_body_mb * 2**20,
            request_s=self.request_timeout,
        )
        return Front(names, server, self.session_header)


@dataclass(frozen=True, slots=True)
class Front:
    """Of a deployment what the ingress has to know: a change of the rest leaves it running.

    Attributes:
        names: of each model.
        server: keys, origins and the size of bodies.
        session_header: see `Deployment`.
    """

    names: tuple[tuple[str, ...], ...]
    server: ServerConfig
    session_header: str


def read_deployment(file: Path) -> Deployment:
    """What a YAML file says.

    Raises:
        NotDeployable: it cannot be read, or a field is wrong; the error names the field.
    """
    try:
        given = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _bad(f"{file} cannot be read as YAML: {error}") from error
    if not isinstance(given, dict):
        raise _bad(f"{file} holds no fields (allowed: at least models)")
    return checked(given, str(file))


def checked(given: dict[str, Any], source: str) -> Deployment:
    """The same of values that were read already.

    Raises:
        NotDeployable: a field is wrong; the error names it.
    """
    try:
        deployment = Deployment.model_validate(given)
        deployment.front()
    except ValidationError as error:
        first = next(
            (one for one in error.errors() if one["type"] == "extra_forbidden"), error.errors()[0]
        )
        field = path_of(first["loc"]) or "the file"
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(_fields_beside(first["loc"]))
            raise _bad(f"{source}: {field} is no field (allowed: {allowed})") from error
        shown = first["msg"].removeprefix("Value error, ")
        raise _bad(f"{source}: {field}: {shown}") from error
    except SettingError as error:
        raise _bad(f"{source}: {error.message}") from error
    return deployment


def _fields_beside(place: tuple[str | int, ...]) -> list[str]:
    """Names of the fields that there are, where one was given that is not."""
    of: dict[str, type[BaseModel]] = {"autoscaling": Autoscaling, "models": ModelSpec}
    for part in reversed(place[:-1]):
        if isinstance(part, str) and part in of:
            return list(of[part].model_fields)
    return list(Deployment.model_fields)


def _bad(message: str) -> NotDeployable:
    return NotDeployable(message, "correct the file; docs/many-machines.md lists its fields")
