"""What a device can do decides the precision."""

from pathlib import Path

import pytest
import torch

from tokendrop.errors import UserError
from tokendrop.train.device import pick_dtype

CPU, CPUINFO = torch.device("cpu"), Path("/proc/cpuinfo")


@pytest.mark.skipif(not CPUINFO.exists(), reason="what this CPU can do is not to be read from /proc/cpuinfo")
def test_matrix_products_are_in_bf16_just_where_the_cpu_has_instructions_for_it():
    flags = CPUINFO.read_text().split()
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        assert pick_dtype("auto", CPU) == pick_dtype("bf16", CPU) == torch.bfloat16
    else:
        assert pick_dtype("auto", CPU) == torch.float32
        with pytest.raises(UserError, match=r"train\.precision: this cpu has no bf16 instructions; want 'auto'"):
            pick_dtype("bf16", CPU)


def test_other_precisions_are_taken_as_they_are_written():
    assert (pick_dtype("fp32", CPU), pick_dtype("fp64", CPU)) == (torch.float32, torch.float64)
