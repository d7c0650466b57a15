"""The running sum that PyTorch has no deterministic kernel of on a GPU."""

import pytest
import torch

from lingpt.kernels.precision import running_sum, running_sum_by_products


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 64, 65, 600])
def test_products_give_the_running_sum(n):
    """Any length: none, less than a block, whole blocks, blocks of blocks; along a middle dimension."""
    x = torch.randn(2, n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(running_sum_by_products(x, 1, block=8), x.cumsum(1))


@pytest.mark.gpu
def test_pytorch_refuses_and_we_do_not():
    x = torch.randn(3, 1000, dtype=torch.float64, device="cuda")
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match="deterministic"):
            x.cumsum(1)
        found = running_sum(x, 1)
    finally:
        torch.use_deterministic_algorithms(before)
    torch.testing.assert_close(found, x.cumsum(1))
