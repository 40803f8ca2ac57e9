import torch

from elastictrain.train.parked_memory import ParkedMemory


def test_memory_is_given_back_and_taken_again_under_the_same_tensors() -> None:
    whole = torch.arange(12.0)
    tensors = [whole[:4], whole[4:].view(2, 4), torch.ones(3), torch.empty(0)]
    parked = ParkedMemory.give(tensors, peak_bytes=7)
    assert [tensor.untyped_storage().nbytes() for tensor in (*tensors, whole)] == [0] * 5
    assert sorted(size for _, size in parked.storages) == [12, 48]
    parked.take()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [48, 48, 12, 0]
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(2.0)
    assert whole.tolist() == [2.0] * 12, "they share it as before"
