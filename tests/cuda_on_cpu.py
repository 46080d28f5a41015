"""Runs train_gpt2.py on pretended GPUs: tensors that say "cuda:0" and compute on the CPU.

    echo '{"folder": ".", "flags": ["--demo"], "gpu_bytes": [80e9], "capability": "9.0", "port": 0, "age": 0}' | python cuda_on_cpu.py LIBRARY

LIBRARY is cuda_on_cpu.cpp, compiled. Each line that is read is a run in that folder, in a fork of this process, which has imported
PyTorch. It is answered by a line when the run is over.

A run writes into `output.txt` what its ranks print, and at last a JSON line with a report of each rank: its exit code, the waits of
the host for the device in each step, copies in a step from memory that is not pinned, and uses of CUDA in the thread that saves.

A run that passes shows that no operation mixes host and device, where the host waits, that running out of memory is survived
wherever the allocator raises it, and that the values are right. Attention has the operators of flash attention, the loss its branch
for CUDA, autocast is CUDA's, and optimizers and the gradient scaler are given tensors on CUDA.
It shows nothing about speed, kernels, torch.compile, streams, NCCL, how FSDP frees what it gathered, or peak memory to the byte.

It replaces private functions of PyTorch, so it works with the version of requirements.txt only, and needs a C++ compiler.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import train_gpt2
from support.console.curves import CurvesFile
from support.optim import loss
from support.runtime import clock, cuda_graphs, devices, distributed

ROOT, aten = str(Path(train_gpt2.__file__).parent), torch.ops.aten
EVENTS = collections.Counter[str]()  # kind of event, and the line of the project that caused it


def note(kind: str) -> None:
    frame = sys._getframe(1)
    while frame and (not frame.f_code.co_filename.startswith(ROOT) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    where = f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_lineno}" if frame else "autograd"
    EVENTS[f"{kind} at {where}"] += 1


class Memory:
    """The pretended memory: it holds the storages of tensors that exist."""

    total, used, lock = 80 * 10**9, 0, threading.RLock()
    tensors = collections.Counter[int]()  # by storage

    @classmethod
    def hold(cls, tensor: OnCuda) -> None:
        storage = tensor.inner.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        with cls.lock:
            if not cls.tensors[key]:
                if cls.used + nbytes > cls.total:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes:,} bytes.")
                cls.used += nbytes
            cls.tensors[key] += 1
        weakref.finalize(tensor, cls.release, key, nbytes).atexit = False

    @classmethod
    def release(cls, key: int, nbytes: int) -> None:
        with cls.lock:
            cls.tensors[key] -= 1
            if not cls.tensors[key]:
                del cls.tensors[key]
                cls.used -= nbytes


def this_gpu() -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


class OnCuda(torch.Tensor):
    """A tensor on CUDA, whose values are in `inner` on the CPU."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnCuda:
        layout = dict(strides=inner.stride(), storage_offset=inner.storage_offset(), layout=inner.layout)
        layout |= dict(dtype=inner.dtype, device=this_gpu(), requires_grad=inner.requires_grad)
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **layout)
        tensor.inner = inner
        Memory.hold(tensor)
        return tensor

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})


class PretendedCuda(TorchDispatchMode):
    """Sends what makes tensors to `dispatch`, too; OnCuda does it for what takes them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not set(types) <= {torch.Tensor, torch.nn.Parameter, OnCuda}:
            return NotImplemented  # a DTensor, which calls the operation on its parts
        return dispatch(function, args, kwargs or {})


COPIES = {aten._to_copy.default, aten.copy_.default}
MAY_MIX_DEVICES = COPIES | {aten.index.Tensor, aten.index_put_.default}
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}


def on_cuda(x: object) -> bool:
    return isinstance(x, OnCuda)


def to_inner(x: object) -> object:
    return x.inner if isinstance(x, OnCuda) else x


def from_inner(x: object) -> object:
    x = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
    return OnCuda(x) if isinstance(x, torch.Tensor) and not on_cuda(x) else x


def dispatch(function, args, kwargs):
    """Does on the CPU what PyTorch would do on CUDA, and raises what it would raise."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if function is aten.is_pinned.default:
        return hasattr(args[0], "pinned")
    if function is aten._pin_memory.default:
        (pinned := args[0].clone()).pinned = True
        return pinned
    takes_cuda = any(map(on_cuda, tensors))
    if not takes_cuda and (target is None or target.type != "cuda"):
        return function(*args, **kwargs)
    if threading.current_thread().name.startswith("checkpoint"):
        note("CUDA in the thread that saves")
    if takes_cuda and function not in MAY_MIX_DEVICES:
        written = [x for x, p in zip(args, function._schema.arguments) if p.alias_info and p.alias_info.is_write]  # noqa: B905
        strange = [x for x in tensors if not on_cuda(x) and (x.dim() or any(x is w for w in written))]
        if strange:
            raise RuntimeError(f"{function}: expected all tensors to be on the same device, but found cuda and cpu")
    by_mask = function is aten.index.Tensor and any(i is not None and i.dtype is torch.bool for i in args[1])
    if function in WAITS or by_mask:
        note(f"wait for {function}")
    if function in COPIES:
        source, target = (args[0], target) if function is aten._to_copy.default else (args[1], args[0].device)
        if on_cuda(source) and target is not None and target.type == "cpu":
            note("wait for a copy to the host")
            return function(*map(to_inner, args), **kwargs)
        if not on_cuda(source) and source.dim() and not hasattr(source, "pinned"):
            note("copy from memory that is not pinned")
    if special := SPECIAL.get(function):
        return special(*args, **kwargs)
    inner_args, inner_kwargs = tree_map(to_inner, (args, kwargs))
    if inner_kwargs.get("device") is not None:
        inner_kwargs["device"] = "cpu"
    outputs = tree_map(from_inner, function(*inner_args, **inner_kwargs))
    return return_and_correct_aliasing(function, args, kwargs, outputs) if takes_cuda else outputs


# ---- operations that are others on CUDA than on a CPU


def has_flash(query, key, value, attn_mask=None, *_, **__) -> int:
    return int(query.dtype in (torch.float16, torch.bfloat16) and attn_mask is None)  # SDPBackend: 1 flash, 0 not fused


def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    q, k, v = map(to_inner, (query, key, value))
    out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    rest = None, None, q.size(2), k.size(2), torch.zeros(2, dtype=torch.uint64), torch.zeros(()), torch.zeros(())
    return tuple(map(from_inner, (out, log_sum, *rest)))


def flash_backward(grad, query, key, value, out, log_sum, _q, _k, _max_q, _max_k, dropout_p, is_causal, *_, scale=None):
    tensors = map(to_inner, (grad, query, key, value, out, log_sum))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, scale=scale)
    return tuple(map(from_inner, grads))


def add_product(total, a, b, dtype, *, out):
    assert out is total  # as the trainer calls it
    to_inner(out).add_(torch.mm(to_inner(a).to(dtype), to_inner(b).to(dtype)))
    return out


SPECIAL = {
    aten._fused_sdp_choice.default: has_flash,
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten.mm.dtype: lambda a, b, dtype: from_inner(torch.mm(to_inner(a).to(dtype), to_inner(b).to(dtype))),
    aten.addmm.dtype_out: add_product,
    torch.ops.gpt2.summed_cross_entropy.default: lambda *args: loss._summed_cross_entropy._init_fn(*args),
}


def apply_to_module(module: torch.nn.Module, function, recurse: bool = True) -> torch.nn.Module:
    """Module._apply, which would untie parameters of a subclass of Tensor."""
    moved: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and parameter not in moved:
                with torch.no_grad():
                    new = function(parameter)
                same = new is parameter
                moved[parameter] = new if same else torch.nn.Parameter(new.detach(), parameter.requires_grad)
            submodule._parameters[name] = moved.get(parameter)
    return module


def pretend(capability: tuple[int, int]) -> None:
    """Makes PyTorch and the project believe in eight GPUs, without CUDA graphs."""
    cuda_graphs.are_faster = lambda *_: False
    name = "NVIDIA H100 80GB HBM3"
    answers = dict(is_available=True, device_count=8, current_device=this_gpu().index, get_device_name=name)
    answers |= dict(get_device_capability=capability, is_current_stream_capturing=False, memory_reserved=0)
    answers |= dict(set_device=None, synchronize=None, empty_cache=None, manual_seed_all=None, _lazy_init=None)
    answers |= dict(get_rng_state=torch.zeros(16, dtype=torch.uint8), set_rng_state=None, _is_in_bad_fork=False)
    properties = SimpleNamespace(name=name, total_memory=Memory.total, major=capability[0], minor=capability[1])
    for function, answer in (answers | {"get_device_properties": properties}).items():
        setattr(torch.cuda, function, lambda *_, answer=answer, **__: answer)
    torch.cuda.current_stream = torch.cuda.stream = torch.cuda.Stream = lambda *_, **__: MagicMock()
    torch.cuda.Event = torch.Event = MagicMock
    torch.cuda.is_bf16_supported = lambda including_emulation=True: capability >= (8, 0) or including_emulation
    torch.cuda.mem_get_info = lambda *_: (Memory.total - Memory.used, Memory.total)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.nn.Module._apply = apply_to_module
    attention, init_ddp, tensor = F.scaled_dot_product_attention, DistributedDataParallel.__init__, torch.tensor

    def choose_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        if on_cuda(query) and has_flash(query, key, value, attn_mask):
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
        return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)

    def init_without_timer(self, *args, **options):  # its timer asks CUDA
        init_ddp(self, *args, **options)
        self.logger = MagicMock()

    torch.tensor = lambda data, *, device=None, **options: tensor(data, **options).to(device)  # it passes no mode
    F.scaled_dot_product_attention, DistributedDataParallel.__init__ = choose_attention, init_without_timer
    _fsdp_param.free_storage = _fsdp_param.alloc_storage = lambda tensor: None  # what was gathered stays
    generator = type("CudaGenerator", (torch.Generator,), {"device": this_gpu()})
    devices.seeded_generator = lambda device, *seeds: generator().manual_seed(devices.derive_seed(*seeds))
    distributed.backend = lambda: "gloo"


# ---- runs


def run_rank(flags: list[str], gpu_bytes: float, capability: str) -> dict[str, object]:
    """A run in this process; what the docstring of this module promises of it."""
    signal.alarm(120)
    Memory.total = int(gpu_bytes)
    pretend(tuple(map(int, capability.split("."))))
    train_step, steps, code = train_gpt2.train_step, [], 0

    def watched_step(*args):
        before, result = EVENTS.copy(), train_step(*args)
        steps.append(EVENTS - before)
        return result

    train_gpt2.train_step = watched_step
    try:
        with PretendedCuda():
            train_gpt2.main(flags)
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:
        traceback.print_exc()
        code = 1

    def of(kind: str, events: collections.Counter[str]) -> list[str]:
        return [where for event in events.elements() for found, _, where in [event.partition(" at ")] if kind in found]

    unpinned = [where for step in steps for where in of("not pinned", step)]
    waits = [of("wait", step) for step in steps]
    return {"exit code": code, "waits": waits, "not pinned": unpinned, "while saving": of("saves", EVENTS)}


def run(folder: str, flags: list[str], gpu_bytes: list[float], port: int, capability: str, age: float) -> None:
    """A run on as many GPUs as there are sizes of their memory."""
    ranks, clock.STARTED = len(gpu_bytes), time.perf_counter() - age
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "RANK": "0"}
    pipes = []
    for rank in range(1, ranks):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.write(writer, json.dumps(run_rank(flags, gpu_bytes[rank], capability)).encode())
            os._exit(0)
        os.close(writer)
        pipes.append(reader)
    reports = [run_rank(flags, gpu_bytes[0], capability)]
    reports += [json.loads(open(reader).read()) for reader in pipes]  # noqa: SIM115
    print(json.dumps(reports), flush=True)
    os._exit(0)


def main() -> None:
    import torch._dynamo  # which each run would import

    torch.set_num_threads(1)
    CurvesFile.draw = lambda self: None  # which takes longer than most of these runs
    for line in sys.stdin:
        if os.fork() == 0:
            run(**json.loads(line))
        os.wait()
        print("done", flush=True)


if __name__ == "__main__":
    main()
