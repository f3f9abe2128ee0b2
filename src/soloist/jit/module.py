"""A compiled kernel in a CUDA context, and its launches. Must not know what the kernel computes.

The context is the one that is current when the module is loaded: torch's, once torch has touched
the GPU. Calls may come from any thread. The code stays loaded as long as the process lives.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from soloist.errors import LaunchError
from soloist.jit.bindings import driver
from soloist.jit.compiler import Cubin

if TYPE_CHECKING:
    # A ctypes value of the parameter's type: c_void_p for a pointer, c_int32, c_float, a struct or
    # its bytes.
    _Simple: TypeAlias = ctypes._SimpleCData[Any]  # noqa: SLF001 - its only name
    Argument: TypeAlias = _Simple | ctypes.Structure | ctypes.Array[ctypes.c_uint8]

# Larger clusters work on some chips only, and have to be asked for.
_PORTABLE_CLUSTER = 8
# The driver from which on it can be told to load one function: of CUDA 12.4.
_LOADS_FUNCTIONS = 12040


class _Like(NamedTuple):
    """What a launch is like, as of `Module.launch`."""

    grid: int
    threads: int
    dynamic_smem: int
    stream: int
    cooperative: bool
    cluster: int
    overlaps: bool


class Module:
    """One entry function, loaded."""

    def __init__(self, cubin: Cubin, entry: str) -> None:
        """Load `cubin` into the current context. Raises LaunchError, CudaMissing."""
        self._driver = driver()
        self._entry = entry
        self._max_dynamic_smem = 0
        # What the last launch was like, and how the driver was told: the next one mostly is alike.
        self._last_config: tuple[_Like, Any] | None = None
        loading = f"loading kernel '{entry}' for {cubin.arch}"
        self._context = self._call(loading, "cuCtxGetCurrent")
        if not int(self._context):
            reason = "no CUDA context is current in this thread"
            raise LaunchError(loading, reason, "allocate something on the GPU with torch first")
        device = self._call(loading, "cuCtxGetDevice")
        sm_count = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.num_sms = int(self._call(loading, "cuDeviceGetAttribute", sm_count, device))
        module = self._call(loading, "cuModuleLoadData", cubin.data)
        self._function = self._call(loading, "cuModuleGetFunction", module, entry.encode())
        self._parameter_bytes = self._read_parameters()

    def make_ready(self, dynamic_smem: int) -> None:
        """Do now what the first launch would do, and what may wait for all kernels of the context.

        The driver loads code when it is first needed. Kernels that wait for each other would wait
        forever if the second one had yet to be loaded.
        """
        what = f"making kernel '{self._entry}' ready"
        with self._current_context(what):
            if self._call(what, "cuDriverGetVersion") >= _LOADS_FUNCTIONS:
                self._call(what, "cuFuncLoad", self._function)
            self._allow_dynamic_smem(dynamic_smem)

    def max_active_blocks(self, threads: int, dynamic_smem: int) -> int:
        """Blocks of `threads` threads that one SM holds at once; 0 where not even one fits."""
        what = f"fitting blocks of {threads} threads and {dynamic_smem:,} bytes of shared memory"
        with self._current_context(what):
            self._allow_dynamic_smem(dynamic_smem)
            call = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
            return int(self._call(what, call, self._function, threads, dynamic_smem))

    def launch(  # noqa: PLR0913 - what launches differ in
        self,
        grid: int,
        threads: int,
        dynamic_smem: int,
        args: Sequence["Argument"],
        stream: int,
        *,
        cooperative: bool = True,
        cluster: int = 1,
        overlaps: bool = False,
    ) -> None:
        """Start the kernel in `stream` and return at once.

        Args:
            grid: blocks.
            threads: of one block.
            dynamic_smem: bytes of shared memory of one block, on top of the static ones.
            args: the kernel's parameters as ctypes values, in order.
            stream: handle, such as `torch.cuda.current_stream().cuda_stream`.
            cooperative: blocks wait for each other, so all must run at once. More of them than fit
                are refused.
            cluster: blocks of one cluster; `grid` is a multiple of it.
            overlaps: it may begin while the kernel before it in the stream runs, and awaits it by
                itself (ptx/dependent.cuh; sm_90 on).

        Raises LaunchError.
        """
        what = f"launching kernel '{self._entry}'"
        sizes = tuple(map(ctypes.sizeof, args))
        assert sizes == self._parameter_bytes, (  # the driver would read whatever is there
            f"{self._entry} takes parameters of {self._parameter_bytes} bytes, got {sizes}"
        )
        assert grid % cluster == 0, f"{grid} blocks are no whole number of clusters of {cluster}"
        addresses = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        with self._current_context(what):
            like = _Like(grid, threads, dynamic_smem, stream, cooperative, cluster, overlaps)
            config = self._config_for(what, like)
            self._call(
                what, "cuLaunchKernelEx", config, self._function, ctypes.addressof(addresses), 0
            )

    def _config_for(self, what: str, like: "_Like") -> Any:  # noqa: ANN401 - the bindings have no types
        """How to start such a launch; refuses blocks that would wait for others for ever."""
        if (last := self._last_config) is not None and last[0] == like:
            return last[1]
        grid, threads, dynamic_smem, stream, cooperative, cluster, overlaps = like
        self._allow_dynamic_smem(dynamic_smem)
        if cluster > _PORTABLE_CLUSTER:
            self._allow("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        config = self._config(grid, threads, dynamic_smem, stream, cluster)
        if cooperative:
            self._require_fit(what, config, grid, threads, dynamic_smem, cluster)
            if cluster == 1:  # the driver refuses both; what fits was checked
                self._add(config, "COOPERATIVE", "cooperative")
        if overlaps:
            self._add(
                config, "PROGRAMMATIC_STREAM_SERIALIZATION",
                "programmaticStreamSerializationAllowed",
            )  # fmt: skip
        self._last_config = like, config
        return config

    def _config(self, grid: int, threads: int, dynamic_smem: int, stream: int, cluster: int) -> Any:  # noqa: ANN401 - the bindings have no types
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = dynamic_smem
        config.hStream = self._driver.CUstream(stream)
        if cluster > 1:
            attribute = self._driver.CUlaunchAttribute()
            names = self._driver.CUlaunchAttributeID
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape = attribute.value.clusterDim
            shape.x, shape.y, shape.z = cluster, 1, 1
            config.attrs, config.numAttrs = [attribute], 1
        return config

    def _add(self, config: Any, name: str, value: str) -> None:  # noqa: ANN401 - the bindings have no types
        """Switch an attribute of a launch on."""
        attribute = self._driver.CUlaunchAttribute()
        names = self._driver.CUlaunchAttributeID
        attribute.id = getattr(names, f"CU_LAUNCH_ATTRIBUTE_{name}")
        setattr(attribute.value, value, 1)
        config.attrs = [*config.attrs, attribute]
        config.numAttrs = len(config.attrs)

    def _require_fit(
        self,
        what: str,
        config: Any,  # noqa: ANN401 - the bindings have no types
        grid: int,
        threads: int,
        dynamic_smem: int,
        cluster: int,
    ) -> None:
        """Refuse blocks that would wait for others which cannot start."""
        if cluster == 1:
            per_sm = self.max_active_blocks(threads, dynamic_smem)
            most, how = per_sm * self.num_sms, f"{per_sm} on each of {self.num_sms} SMs"
        else:
            clusters = self._call(what, "cuOccupancyMaxActiveClusters", self._function, config)
            most, how = int(clusters) * cluster, f"{clusters} clusters of {cluster}"
        if grid > most:
            raise LaunchError(
                what,
                f"{grid} blocks of {threads} threads and {dynamic_smem:,} bytes of shared memory "
                f"have to run at once, and {most} fit ({how})",
                "the plan was made for another GPU, or this one is shared (MPS, MIG)",
            )

    def _read_parameters(self) -> tuple[int, ...]:
        """Bytes of each parameter: asked for until there is no next one."""
        sizes: list[int] = []
        while True:
            result, _, size = self._driver.cuFuncGetParamInfo(self._function, len(sizes))
            if int(result):
                return tuple(sizes)
            sizes.append(int(size))

    def _allow_dynamic_smem(self, dynamic_smem: int) -> None:
        """More than 48 KB have to be asked for, once."""
        if dynamic_smem > self._max_dynamic_smem:
            self._allow("MAX_DYNAMIC_SHARED_SIZE_BYTES", dynamic_smem)
            self._max_dynamic_smem = dynamic_smem

    def _allow(self, name: str, value: int) -> None:
        attribute = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        what = f"setting {name.lower()} of kernel '{self._entry}' to {value:,}"
        self._call(what, "cuFuncSetAttribute", self._function, attribute, value)

    @contextmanager
    def _current_context(self, what: str) -> Iterator[None]:
        self._call(what, "cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call(what, "cuCtxPopCurrent")

    def _call(self, what: str, function: str, *args: Any) -> Any:  # noqa: ANN401 - no types
        """The value that a driver function returns, if any. Raises LaunchError."""
        result, *values = getattr(self._driver, function)(*args)
        if int(result):
            _, name = self._driver.cuGetErrorName(result)
            _, text = self._driver.cuGetErrorString(result)
            raise LaunchError(what, f"{name.decode()}: {text.decode()} ({function})")
        return values[0] if values else None
