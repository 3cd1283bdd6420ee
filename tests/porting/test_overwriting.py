"""Files that every worker would write are named with their line before the run."""

import pytest

from paceline.porting.reading import Source, note_of_writes

WRITES = [
    "torch.save(model.state_dict(), 'model.pt')",
    "open('log.txt', 'w')",
    "open('log.txt', mode='ab')",
    "Path('log.txt').write_text('x')",
    "Path('log.txt').open('w')",
    "np.savez('a.npz', x=x)",
    "frame.to_csv('a.csv')",
    "figure.savefig('a.png')",
    "os.makedirs('out')",
    "shutil.copyfile('last.pt', 'best.pt')",
    "os.replace('new.pt', 'last.pt')",
    "os.remove('last.pt')",
    "Path('out').mkdir()",
    "datasets.MNIST('data', download=True)",
    "torch.save(ranker.state_dict(), 'ranker.pt')",
    "torch.save(model.state_dict(), f'low_rank-{num_workers}.pt')",
]
KEEPS = [
    "open('log.txt')",
    "open('log.txt', 'rb')",
    "torch.load('model.pt')",
    "os.makedirs('out', exist_ok=True)",
    "open(f'log-{pace.worker}.txt', 'w')",
    "torch.save(x, f'part-{rank}.pt')",
    "shutil.copyfile('last.pt', f'best-{rank}.pt')",
    "torch.save(x, f'part-{args.local_rank}.pt')",
    "Path(f'{os.getpid()}.txt').write_text('x')",
    "open(os.devnull, 'w')",
    "datasets.MNIST('data', download=False)",
    "pace.save('model.safetensors')",
]
GUARDS = [
    "if pace.is_main:\n    {}",
    "if rank == 0:\n    {}",
    "if dist.get_rank() == 0 and epoch % 2:\n    {}",
    "with pace.once():\n    {}",
    "with pace.once() as is_first:\n    if is_first:\n        {}",
    "if not pace.is_main:\n    pass\nelse:\n    {}",
    "def save():\n    if not pace.is_main:\n        return\n    {}\nsave()",
    "def save():\n    {}\nif pace.is_main:\n    save()",
]
IMPORTS = "import os, shutil, torch\nimport numpy as np\nfrom pathlib import Path\n"


def note(text: str) -> str:
    return note_of_writes(Source(IMPORTS + text + "\n"), "train.py")


@pytest.mark.parametrize("line", WRITES)
def test_file_written_by_all_workers_is_named(line: str) -> None:
    message = note(line)
    assert message.startswith("train.py:4 ")
    assert " runs in every worker, on the same files: " in message


@pytest.mark.parametrize("line", KEEPS)
def test_file_read_or_private_to_a_worker_is_not_named(line: str) -> None:
    assert note(line) == ""


@pytest.mark.parametrize("guard", GUARDS)
def test_file_written_by_one_worker_is_not_named(guard: str) -> None:
    assert note(guard.format("torch.save(model, 'model.pt')")) == ""


@pytest.mark.parametrize(
    "guard",
    ["if not pace.is_main:\n    {}", "if epoch == 0:\n    {}", "with open('a') as f:\n    {}"],
)
def test_unrelated_condition_is_no_guard(guard: str) -> None:
    assert note(guard.format("torch.save(model, 'model.pt')")) != ""


def test_sentence_names_the_first_writes_and_counts_the_rest() -> None:
    message = note("\n".join(f"torch.save(x, '{n}.pt')" for n in range(5)))
    assert message.count("torch.save(...)") == 3
    assert "and 2 more run in every worker" in message
