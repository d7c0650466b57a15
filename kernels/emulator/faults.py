"""What the emulator reports. A message names the kernel, the block, the instruction and its source line."""


class EmulatorError(Exception):
    """A kernel did what it must not do, or what the emulator does not implement."""


class MemcheckError(EmulatorError):
    """An access outside of what was allocated, or not aligned to its size."""


class RaceError(EmulatorError):
    """Accesses to shared memory that nothing orders, or to what a copy or product in flight is using."""


class ProxyError(EmulatorError):
    """Ordinary writes that reach the async proxy (wgmma) without fence.proxy.async."""


class DeadlockError(EmulatorError):
    """No thread can run and nothing is in flight."""


class LaunchError(EmulatorError):
    """A launch that the hardware would refuse, or a kernel that ends with something unfinished."""


class UnknownInstruction(EmulatorError):
    """PTX that the emulator does not implement."""
