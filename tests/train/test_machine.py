"""What a machine can carry, and the line where it cannot."""

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.train.machine import out_of_memory


@pytest.mark.parametrize(("size", "fix"), [(4, "--train.micro_batch_size 2"), (1, "a smaller model")])
def test_out_of_memory_says_what_to_lower(size, fix):
    with pytest.raises(UserError, match=f"micro-batches of {size}: try {fix}"), out_of_memory(size):
        raise torch.OutOfMemoryError("CUDA out of memory")
