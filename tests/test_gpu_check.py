"""benchmarks/gpu_check.py: its checks on a CPU with a tiny model, and where the time of a step goes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import gpu_check
import pytest
from test_benchmarks import measure_in_fork


@pytest.mark.slow
def test_the_checks_find_what_they_expect_on_a_cpu(tmp_path, monkeypatch):
    """The checks that run no whole script are called in this process; no others are needed on a CPU with --small."""
    monkeypatch.setattr(gpu_check, "measure", measure_in_fork)
    figures = {}
    for name in "environment training large_model pairs loss_alone larger scoring".split():
        (tmp_path / name).mkdir()
        reports = []
        pipe = SimpleNamespace(send=reports.append)
        getattr(gpu_check, name)(gpu_check.Context("cpu", True, tmp_path / name, math.inf, pipe))
        figures[name] = sum(kind == "figure" for kind, *_ in reports)
    assert figures == dict(environment=2, training=1, large_model=0, pairs=3, loss_alone=2, larger=0, scoring=6)


def test_kernels_are_divided_into_classes():
    """A step by hand, in microseconds: two kernels overlap, and nothing runs from 40 to 50."""
    kernels = [
        ("nvjet_sm90_tst_128x256_64x4", 0, 10),
        ("triton_poi_fused_add_native_layer_norm_backward_3", 10, 5),
        ("triton_red_fused__to_copy_mul_sum_7", 15, 5),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 20, 20),
        ("void at::native::reduce_kernel<512>", 30, 8),
        ("nvjet_sm90_tst_128x256_64x4", 50, 7),
    ]
    events = [{"cat": "kernel", "name": name, "ts": 1000 + ts, "dur": dur} for name, ts, dur in reversed(kernels)]
    events += [{"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 1057, "dur": 1}]
    events += [{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9999}, {"name": "no category", "ts": 0}]
    classes, by_kernel = gpu_check.classify_kernels(events)
    assert classes == {"GEMM": 17, "attention": 20, "reductions": 13, "pointwise": 5, "copies": 1, "idle": 10}
    longest = ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 20), ("nvjet_sm90_tst_128x256_64x4", 17)
    assert tuple(by_kernel[:2]) == longest
