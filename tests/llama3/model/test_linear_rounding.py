import os

from tests.dist import run


def product_moves() -> None:
    """Multiply operands at every alignment, on one thread; MKL reads its mode at the first product of a process."""
    import torch

    from herd.llama3.model.linear import MKL_MODE, use_reproducible_matmul

    os.environ.pop(MKL_MODE, None)
    use_reproducible_matmul()
    torch.manual_seed(0)
    buffer = torch.empty(64 * 64 + 16)
    for rows in (1, 3, 16):
        for inner in (16, 32, 64):
            left, right = torch.randn(rows, inner), torch.randn(64, inner)
            for start in range(16):
                moved = buffer[start : start + right.numel()].view(right.shape).copy_(right)
                assert torch.equal(left @ moved.T, left @ right.T), (rows, inner, start)


def test_a_product_has_the_same_bits_wherever_its_operands_lie() -> None:
    """On the processors where it does not by itself, which few are; in a process that has not multiplied yet."""
    run(1, product_moves)
