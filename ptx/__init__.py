"""An executor for the PTX of Triton kernels, on the CPU.

===========  ============================================================================================
file         contents
===========  ============================================================================================
`parse`      the text of a kernel as statements
`encode`     registers and constants as slots, instructions as numbers for the machine
`translate`  statements as instructions
`machine`    the machine in C++: one launch under one schedule, and what it found
`driver`     a driver for Triton: kernels that are launched run in the machine
`src`        the machine
===========  ============================================================================================
"""

from keyedopt.ptx.driver import Session, executing, idle
from keyedopt.ptx.machine import Finding, Report, Schedule

__all__ = ["Finding", "Report", "Schedule", "Session", "executing", "idle"]
