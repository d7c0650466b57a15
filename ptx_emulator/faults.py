"""The emulator's errors. A message names the kernel, the block, the instruction and its source line."""


class EmulatorError(Exception):
    """A kernel did something illegal, or something that the emulator does not implement."""


class MemcheckError(EmulatorError):
    """An access outside of allocated memory, or not aligned to its size."""


class RaceError(EmulatorError):
    """Unordered accesses to shared memory, or accesses to data that a copy or product in flight uses."""


class ProxyError(EmulatorError):
    """Ordinary writes that reach the async proxy (wgmma) without fence.proxy.async."""


class DeadlockError(EmulatorError):
    """No thread can run and nothing is in flight."""


class LaunchError(EmulatorError):
    """A launch that the hardware would refuse, or a kernel that ends with something unfinished."""


class UnknownInstruction(EmulatorError):
    """PTX that the emulator does not implement."""
