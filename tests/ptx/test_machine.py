"""The machine against PTX of a few lines: rounding, memory, threads."""

import struct

import pytest
import torch

from keyedopt.ptx import Schedule
from keyedopt.ptx.driver import memory_of
from keyedopt.ptx.machine import load, run
from keyedopt.ptx.parse import UnsupportedInstructionError

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1
)
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<20>;
	.reg .b64 	%rd<20>;
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	mad.wide.u32 	%rd3, %r1, 4, %rd1;
	mad.wide.u32 	%rd4, %r1, 4, %rd2;
"""


def found(body, given, out, grid=1, warps=1, shared=0, **schedule):
    code = load(f"{HEAD}{body}\n\tret;\n}}\n")
    values = [given.data_ptr(), out.data_ptr()]
    report = run(code, (grid, 1, 1), warps, shared, values, memory_of([given, out]), Schedule(**schedule))
    return [one.kind for one in report.findings]


def bits(number):
    return struct.unpack("<I", struct.pack("<f", number))[0]


@pytest.mark.parametrize(("name", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_is_rounded_as_by_torch(name, dtype):
    numbers = torch.tensor([0.0, -0.0, 1.0, 65519.9, 65520.0, 1e-8, 6e-8, 2.0**-14, 3.3e38, float("inf")])
    ties = 1 + torch.arange(12) * 2.0**-12
    given = torch.cat([numbers, ties, -ties[:10] * 3e-5])
    out = torch.zeros(32, dtype=torch.int32)
    body = f"ld.global.b32 %r3, [%rd3];\ncvt.rn.{name}.f32 %rs1, %r3;\ncvt.u32.u16 %r4, %rs1;\n"
    assert not found(f"{body}st.global.b32 [%rd4], %r4;", given, out)
    assert torch.equal(out, given.to(dtype).view(torch.int16).int() & 0xFFFF)


def test_a_multiply_add_is_rounded_once():
    given, out = torch.full((32,), 1 + 2.0**-12), torch.zeros(32)
    body = f"ld.global.b32 %r3, [%rd3];\nfma.rn.f32 %r4, %r3, %r3, 0f{bits(-1 - 2.0**-11):08X};\n"
    assert not found(f"{body}st.global.b32 [%rd4], %r4;", given, out)
    assert out.tolist() == [2.0**-24] * 32


def test_accesses_outside_of_the_tensors_are_found():
    given, out = torch.zeros(31), torch.zeros(32)
    body = "ld.global.b32 %r3, [%rd3];\nst.global.b32 [%rd4 + 0], %r3;"
    assert found(body, given, out) == ["out of bounds"]
    assert found(body.replace("+ 0", "+ 2"), out, out.clone()) == ["out of bounds", "misaligned"]


def test_programs_that_store_different_values_race():
    given, out = torch.zeros(32), torch.zeros(32, dtype=torch.int32)
    assert found("st.global.b32 [%rd4], %r2;", given, out, grid=2) == ["race between programs"]
    assert found("st.global.b32 [%rd4], %r1;", given, out, grid=2) == []  # the same value


def test_a_release_and_an_acquire_order_programs():
    given, out = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = """
	atom.global.gpu.acq_rel.add.u32 %r3, [%rd2], 1;
	ld.global.b32 %r4, [%rd3];
	add.s32 %r4, %r4, 1;
	st.global.b32 [%rd3], %r4;
	atom.global.gpu.acq_rel.add.u32 %r3, [%rd2], 1;
"""
    assert found(body, given, out, grid=3, resident=1) == []
    assert (
        found(body.replace("acq_rel", "relaxed"), given, out, grid=3, resident=1)
        == ["race between programs"] * 2
    )


def test_warps_that_do_not_meet_at_a_barrier_race():
    given, out = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
    body = """
	shl.b32 %r3, %r1, 2;
	st.shared.b32 [%r3], %r1;
	bar.sync 0;
	xor.b32 %r4, %r3, 128;
	ld.shared.b32 %r5, [%r4];
	st.global.b32 [%rd4], %r5;
"""
    assert found(body, given, out, warps=2, shared=256) == []
    assert out.tolist() == [*range(32, 64), *range(32)]
    assert "race within a program" in found(
        body.replace("bar.sync 0;", ""), given, out, warps=2, shared=256, slice=3
    )


def test_a_barrier_that_one_warp_leaves_out_is_found():
    given, out = torch.zeros(64), torch.zeros(64)
    body = "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L1;\nbar.sync 0;\n$L1:\nmov.b32 %r3, 0;"
    assert found(body, given, out, warps=2) == ["divergence"]


def test_a_loop_that_waits_for_ever_is_found():
    given, out = torch.zeros(32), torch.zeros(32)
    body = "$L1:\nld.volatile.global.b32 %r3, [%rd4];\nsetp.eq.b32 %p1, %r3, 0;\n@%p1 bra $L1;"
    assert found(body, given, out) == ["deadlock"]


def test_an_instruction_without_a_model_is_named():
    with pytest.raises(UnsupportedInstructionError, match="wgmma"):
        found("wgmma.fence.sync.aligned;", torch.zeros(32), torch.zeros(32))
