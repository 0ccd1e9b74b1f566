import pytest
import torch


@pytest.fixture
def one_torch_thread():
    """For thousands of calls on small tensors, which torch's threads only slow down: they fight with the kernels' threads."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
