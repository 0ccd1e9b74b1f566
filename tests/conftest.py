import pytest
import torch

# Numbers drawn without a seed of their own are the same in every run: torch seeds each process anew.
torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_numbers_in_every_run():
    """And in every choice of tests."""
    torch.manual_seed(0)


@pytest.fixture
def one_torch_thread():
    """For thousands of calls on small tensors, which torch's threads only slow down: they fight with the kernels' threads."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
