"""The public scripts of results/public-scripts.md: where each is published, and how it is cut.

A cut names lines of the published text, at the commit, and their replacement; the project contains
none of the published text. Most cuts apply to both copies, before `--check` runs; those of the twin
alone make a plain script draw its turns' numbers as a run does (`watched.turns`), or average what
two workers would.
"""

from collections.abc import Iterable
from typing import NamedTuple

SETS = "pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"


class Cut(NamedTuple):
    """Replaces published lines `first` to `last` (0: only `first`) of a file by `new`.

    Args:
        file: a file beside the script; empty for the script itself.
        is_twins: whether only the plain twin gets it.
    """

    first: int
    new: str
    last: int = 0
    file: str = ""
    is_twins: bool = False


class Entry(NamedTuple):
    """A script: who published it, at which commit, how it is run.

    Args:
        more_files: files that it needs from its repository.
        main: the file to run, if that imports the script.
        files: which of `made_up.FILES` fills its folder.
        needs: a package to be installed by hand.
        is_paired: whether each worker of full-sync takes a turn of its own, so that two turns of
            the twin make an update.
        apart: why full-sync cannot be compared with plain.
    """

    name: str
    source: tuple[str, str]
    script: str
    args: str = ""
    cuts: tuple[Cut, ...] = ()
    more_files: tuple[str, ...] = ()
    main: str = ""
    files: str = "nothing"
    needs: str = ""
    is_paired: bool = False
    apart: str = ""
    remark: str = ""


def twin(first: int, new: str, last: int = 0) -> Cut:
    return Cut(first, new, last, is_twins=True)


def texts_of(text: str, file: str, cuts: Iterable[Cut]) -> tuple[str, str]:
    """Return the text of a file in the paced copy, and in the plain twin."""
    file_cuts = [cut for cut in cuts if cut.file == file]
    return _apply(text, [cut for cut in file_cuts if not cut.is_twins]), _apply(text, file_cuts)


def _apply(text: str, cuts: Iterable[Cut]) -> str:
    lines = text.splitlines(keepends=True)
    for cut in sorted(cuts, reverse=True):
        last = cut.last or cut.first
        assert 0 < cut.first <= last <= len(lines), cut
        lines[cut.first - 1 : last] = [cut.new + "\n"] if cut.new else []
    return "".join(lines)


ENTRIES = (
    Entry(
        "pytorch/examples mnist", SETS, "mnist/main.py", "--epochs 2 --batch-size 32",
    ),
    Entry(
        "pytorch/examples dcgan", SETS, "dcgan/main.py",
        "--dataset fake --workers 0 --batchSize 16 --nz 16 --ngf 8 --ndf 8 --niter 2 "
        "--manualSeed 1",
        remark="two networks, two optimizers; its noise a constant in the comparison",
    ),
    Entry(
        "pytorch/examples imagenet", SETS, "imagenet/main.py",
        "--epochs 2 --batch-size 16 --workers 0 --lr 0.01",
        (
            Cut(247, "                transforms.RandomResizedCrop(32),"),
            Cut(256, "                transforms.Resize(36),"),
            Cut(257, "                transforms.CenterCrop(32),"),
        ),
        remark="ResNet-18 of a quarter of its width; the DDP branch stays",
    ),
    Entry(
        "pytorch/examples reinforce", SETS, "reinforcement_learning/reinforce.py", "",
        (
            twin(84, "    for i_episode in watched.turns(count(1)):"),
            Cut(85, "        state, _ = env.reset(seed=watched.state_seed())"),
            Cut(87, "        for t in range(1, 40):"),
            Cut(101, "        if watched.is_over(i_episode, running_reward > 12):"),
        ),
        needs="gymnasium", is_paired=True,
        remark="a loop without an end, that one worker's reward ends for all; an episode is one "
        "worker's: compared with plain in pairs of episodes, whose first states follow from a "
        "turn's number there",
    ),
    Entry(
        "pytorch/examples super_resolution", SETS, "super_resolution/main.py",
        "--upscale_factor 2 --batchSize 4 --testBatchSize 4 --nEpochs 2 --threads 0 --lr 0.001",
        (
            Cut(56, "    crop_size = 32", file="super_resolution/data.py"),
            Cut(66, "    crop_size = 32", file="super_resolution/data.py"),
            Cut(
                21, "        self.image_filenames = sorted(join(image_dir, x) "
                "for x in listdir(image_dir))",
                file="super_resolution/dataset.py",
            ),
        ),
        ("super_resolution/data.py", "super_resolution/dataset.py", "super_resolution/model.py"),
        files="pictures",
    ),
    Entry(
        "pytorch/examples fast_neural_style", SETS,
        "fast_neural_style/neural_style/neural_style.py",
        "train --dataset pictures --style-image style.png --save-model-dir saved --epochs 1 "
        "--batch-size 8 --image-size 32 --log-interval 1 --content-weight 1 --style-weight 1e5",
        (Cut(52, "    optimizer = Adam(transformer.parameters(), args.lr, eps=watched.eps())"),),
        tuple(f"fast_neural_style/neural_style/{module}.py" for module in (
            "utils", "transformer_net", "vgg",
        )),
        remark="a second, frozen network in the loss, of an eighth of its width; a bias before an "
        "instance norm has no gradient but rounding, which Adam divides by itself: the loss is "
        "1e-5 of the published one, and Adam's eps 1e-4 in the comparison",
    ),
    Entry("pytorch/examples word_language_model", SETS, "word_language_model/main.py"),
    Entry("pytorch/examples mnist_forward_forward", SETS, "mnist_forward_forward/main.py"),
    Entry(
        "pytorch/examples actor_critic", SETS, "reinforcement_learning/actor_critic.py", "",
        (
            twin(142, "    for i_episode in watched.turns(count(1)):"),
            Cut(145, "        state, _ = env.reset(seed=watched.state_seed())"),
            Cut(150, "        for t in range(1, 40):"),
            Cut(174, "        if watched.is_over(i_episode, running_reward > 12):"),
        ),
        needs="gymnasium", is_paired=True, remark="as reinforce",
    ),
    Entry(
        "locuslab/TCN add_test.py", ("locuslab/TCN", "2f8c2b817050206397458dfd1f5a25ce8a32fe65"),
        "TCN/adding_problem/add_test.py",
        "--cuda --epochs 2 --seq_len 40 --levels 3 --batch_size 16 --log-interval 5",
        (
            Cut(52, "X_train, Y_train = data_generator(160, seq_length)"),
            Cut(53, "X_test, Y_test = data_generator(32, seq_length)"),
        ),
        ("TCN/__init__.py", "TCN/tcn.py", "TCN/adding_problem/__init__.py",
         "TCN/adding_problem/model.py", "TCN/adding_problem/utils.py"),
        is_paired=True,
        remark="said: each number of its `range` is one worker's batch; compared with plain in "
        "pairs of batches",
    ),
    Entry(
        "jcjohnson/pytorch-examples two_layer_net_optim.py",
        ("jcjohnson/pytorch-examples", "0003fcdc606a79951e53bf8f46f8574fa4739f23"),
        "nn/two_layer_net_optim.py", "",
        (
            Cut(20, "x = torch.randn(N, D_in, generator=torch.Generator().manual_seed(1))"),
            Cut(21, "y = torch.randn(N, D_out, generator=torch.Generator().manual_seed(2))"),
            Cut(37, "for t in range(20):"),
            twin(37, "for t in watched.turns(range(20)):"),
        ),
        remark="said: the loss is a sum; each worker has all samples in each step, so that "
        "nothing is halved",
    ),
    Entry(
        "pytorch/examples mnist_rnn", SETS, "mnist_rnn/main.py", "--epochs 2 --batch-size 32",
    ),
    Entry(
        "pytorch/examples vae", SETS, "vae/main.py", "--epochs 2 --batch-size 32",
        (twin(100, "        (loss / watched.num_workers()).backward()"),),
        files="results",
        remark="said: the loss is a sum; compared with a plain twin of half the loss",
    ),
    Entry(
        "pytorch/examples siamese_network", SETS, "siamese_network/main.py",
        "--epochs 2 --batch-size 16 --test-batch-size 32",
        (
            Cut(
                35, "        self.resnet.conv1 = "
                "nn.Conv2d(1, self.resnet.conv1.out_channels, 7, 2, 3, bias=False)",
            ),
            Cut(133, "        watched.fix_item(index)"),
            Cut(162, "            target = torch.tensor(1, dtype=torch.get_default_dtype())"),
            Cut(185, "            target = torch.tensor(0, dtype=torch.get_default_dtype())"),
        ),
        remark="ResNet-18 of a quarter of its width; its pairs follow from an item's index in the "
        "comparison",
    ),
    Entry(
        "pytorch/examples gcn", SETS, "gcn/main.py", "--epochs 5",
        (
            Cut(236, "", 239),
            twin(250, "    for epoch in watched.turns(range(args.epochs)):"),
        ),
        files="graph", remark="all of the graph in each step: `pace.updates`",
    ),
    Entry(
        "pytorch/examples gat", SETS, "gat/main.py", "--epochs 4 --hidden-dim 16 --num-heads 2",
        (twin(366, "    for epoch in watched.turns(range(args.epochs)):"),),
        files="graph", remark="the same",
    ),
    Entry(
        "pytorch/examples time_sequence_prediction", SETS, "time_sequence_prediction/train.py",
        "--steps 2",
        (
            Cut(47, "    data = torch.load('traindata.pt', weights_only=False)"),
            Cut(71, "            future = 10"),
        ),
        files="waves", remark="LBFGS",
    ),
    Entry(
        "eriklindernoren/PyTorch-GAN wgan_gp",
        ("eriklindernoren/PyTorch-GAN", "36d3c77e5ff20ebe0aeefd322326a134a279b93e"),
        "implementations/wgan_gp/wgan_gp.py", "--n_epochs 2 --batch_size 16 --n_critic 2",
        remark="two networks, two optimizers; its noise a constant in the comparison",
    ),
    Entry(
        "karpathy/nanoGPT train.py",
        ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"), "train.py",
        "--device=cpu --dtype=float32 --compile=False --dataset=noise --batch_size=4 "
        "--gradient_accumulation_steps=2 --block_size=16 --n_layer=2 --n_head=2 --n_embd=32 "
        "--max_iters=5 --eval_iters=2 --eval_interval=3 --warmup_iters=2 --lr_decay_iters=5",
        (
            twin(250, ""),
            twin(
                255, "for iter_num in watched.turns(range(max_iters + 1)):\n"
                "    master_process = watched.is_main()",
            ),
            twin(293, "        X, Y = get_batch('train')\n        if ddp:"),
            twin(303, ""),
            twin(332, "", 333),
        ),
        ("model.py", "configurator.py"), files="tokens", is_paired=True,
        remark="a batch is what one worker draws: compared with plain in pairs of batches; the "
        "rate by hand is said beside the diff",
    ),
    Entry(
        "karpathy/minGPT mingpt/trainer.py",
        ("karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26"), "mingpt/trainer.py",
        "--trainer.max_iters=6 --trainer.batch_size=8 --trainer.num_workers=0",
        (
            Cut(189, "            train_max_batches = 1", file="projects/adder/adder.py"),
            Cut(
                193, "                test_score = eval_split(trainer, 'test', max_batches=1)",
                file="projects/adder/adder.py",
            ),
        ),
        ("mingpt/__init__.py", "mingpt/model.py", "mingpt/utils.py", "projects/adder/adder.py"),
        main="projects/adder/adder.py",
        remark="its sampler of 10,000,000,000 samples is drawn as far as it is used; in turn in "
        "the comparison; the loop goes over a loader, so its twin is not seeded by turn",
    ),
)  # fmt: skip
