"""What nvidia-smi prints of device memory, and what is made of it. Composed after its manual, not on hardware."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from packtrain.monitor import devices
from packtrain.monitor.devices import Device, Holder

A, B = "GPU-6f1b2a3c-0d4e-4f5a-8b9c-000000000001", "GPU-6f1b2a3c-0d4e-4f5a-8b9c-000000000002"


def test_devices_and_holders_are_read() -> None:
    """A line each; what the driver does not tell is unknown, and no zero."""
    assert devices.devices(f"{A}, 4\n{B}, 81012\n") == [Device(A, 4), Device(B, 81012)]
    assert devices.devices(f"{A}, [N/A]\n{B}, [GPU requires reset]\n") == [Device(A, None), Device(B, None)]
    assert devices.holders(f"4711, {A}, 30512\n4712, {B}, [N/A]\n") == [
        Holder(4711, A, 30512), Holder(4712, B, None)
    ]


def test_what_is_no_line_is_passed_over() -> None:
    """Words of a driver that fails, negative numbers and half a line; the whole line beside them counts."""
    noise = [
        "No devices were found", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        f"{A}, -4", f"{A}", f"{A}, 4 MiB", f"{A}, 4, 5, 6", "uuid, memory.used [MiB]", "\x1b[31m", "", "१, २",
    ]
    assert devices.devices("\n".join([*noise, f"{A}, 4"])) == [Device(A, 4)]
    assert devices.holders("\n".join([*noise, f"1, {A}, 4"])) == [Holder(1, A, 4)]


@given(st.text())
def test_no_text_breaks_it(text: str) -> None:
    """Whatever is printed, there is an answer."""
    assert all(one.used_mib is None or one.used_mib >= 0 for one in devices.devices(text))
    assert all(one.pid >= 0 for one in devices.holders(text))
