"""fairscale's shards become a checkpoint of ours; every weight is preserved to the bit."""

from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from fairshard.checkpoint.consolidate import consolidate_torch
from fairshard.checkpoint.contents import read_contents
from fairshard.checkpoint.import_fairscale import import_fairscale
from fairshard.errors import CheckpointError
from tests.checkpoint.written import Exploit, change_byte


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")


@dataclass
class Backing:
    """One registered parameter of a unit: a flat one (``flat_param_0``) of several, or an unflattened one."""

    name: str
    params: dict


@dataclass
class Unit:
    """One FSDP wrapper as fairscale describes it; ``shared`` is in fairscale's own spelling."""

    path: str
    backings: list
    shared: list = field(default_factory=list)
    whole: bool = False


@dataclass
class Model:
    units: list
    buffers: dict = field(default_factory=dict)
    silent_buffers: tuple = ()
    extra: dict = field(default_factory=dict)

    def weights(self):
        """Weights and buffers of the model, under the names of the plain module."""
        found = dict(self.buffers)
        for unit in self.units:
            for backing in unit.backings:
                found |= {join(unit.path, name): value for name, value in backing.params.items()}
        return found


def join(path, name):
    return f"{path}.{name}" if path else name


def write_shards(folder, model, world_size, wrappers=False):
    """Write one file per rank as fairscale saves it; return the paths in the order of ranks.

    A unit's line is cut by ``torch.chunk`` and padded to the size of its first chunk, as in fairscale; a single rank,
    or one in its own process group (``whole``), keeps all of it. ``wrappers`` leaves fairscale's module names in.
    """
    paths = []
    for rank in range(world_size):
        weights, metadata = OrderedDict(), []
        for unit in model.units:
            path = unit.path.replace("layers.", "_fsdp_wrapped_module._fpw_module.layers.") if wrappers else unit.path
            described = {}
            for backing in unit.backings:
                shard, padding = cut(backing, 1 if unit.whole else world_size, rank)
                key = join(path, f"_fsdp_wrapped_module.{backing.name}" if wrappers else backing.name)
                weights[key] = shard
                described[backing.name] = {
                    "names": list(backing.params),
                    "shapes": [value.shape for value in backing.params.values()],
                    "numels": [value.numel() for value in backing.params.values()],
                    "padding": padding,
                }
            metadata.append(
                {
                    "fsdp_path": unit.path,
                    "params": described,
                    "no_broadcast_optim_state": unit.whole,
                    "shared_param_info": unit.shared,
                }
            )
        for name, first in model.extra.items():
            weights[name] = weights[first]
        for name, value in model.buffers.items():
            weights[name] = value if rank == 0 else value + 1
        names = [*model.buffers, *model.silent_buffers]
        paths.append(str(folder / f"shard_{rank}.pt"))
        found = {"shard_weights": weights, "shard_metadata": {"param_metadata": metadata, "buffer_names": names}}
        torch.save(found, paths[-1])
    return paths


def cut(backing, world_size, rank):
    if world_size == 1:
        (first, *others) = backing.params.values()
        return (first if not others else torch.cat([value.reshape(-1) for value in (first, *others)])), 0
    line = torch.cat([value.reshape(-1) for value in backing.params.values()])
    chunks = list(line.chunk(world_size))
    own = chunks[rank] if rank < len(chunks) else line.new_empty(0)
    padding = chunks[0].numel() - own.numel()
    return F.pad(own, [0, padding]), padding


FC = {"fc.weight": numbers(5, 3, seed=1), "fc.bias": numbers(5, seed=2)}
NORM = {"norm.weight": numbers(7, seed=3), "norm.bias": numbers(7, seed=4)}

MODELS = {
    "one flat parameter": Model([Unit("", [Backing("flat_param_0", FC)])]),
    "nested units, flattened": Model(
        [
            Unit("", [Backing("flat_param_0", {"scale": torch.tensor(0.5)})]),
            Unit("layers.0", [Backing("flat_param_0", FC)]),
            Unit("layers.1", [Backing("flat_param_0", NORM)]),
            Unit("layers.1.inner", [Backing("flat_param_0", {"w": numbers(2, 2)})]),
        ],
    ),
    "several flat parameters in a unit": Model(
        [Unit("layers.0", [Backing("flat_param_decay", FC), Backing("flat_param_no_decay", NORM)])]
    ),
    "not flattened": Model([Unit("layers.0", [Backing(name, {name: value}) for name, value in FC.items()])]),
    "flattened in part": Model(
        [Unit("", [Backing("flat_param_0", FC), Backing("emb.weight", {"emb.weight": numbers(9, 2)})])]
    ),
    "buffers, one of them without a value": Model(
        [Unit("layers.0", [Backing("flat_param_0", FC)])],
        buffers={"layers.0.bn.running_mean": numbers(3), "layers.0.bn.num_batches_tracked": torch.tensor(4)},
        silent_buffers=("rope",),
    ),
    "a unit that every rank holds whole": Model(
        [Unit("", [Backing("flat_param_0", FC)]), Unit("bn", [Backing("flat_param_0", NORM)], whole=True)]
    ),
    "half precision": Model([Unit("", [Backing("flat_param_0", {name: value.half() for name, value in FC.items()})])]),
    "a unit without parameters": Model([Unit("", []), Unit("layers.0", [Backing("flat_param_0", FC)])]),
}


def imported(paths, out):
    """Import, then read the model from the checkpoint through consolidation."""
    import_fairscale(paths, out)
    consolidate_torch(out, f"{out}.pt")
    return torch.load(f"{out}.pt", weights_only=True)


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("wrappers", [False, True], ids=["clean names", "wrappers in names"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_every_weight_is_what_it_was(tmp_path, model, wrappers, world_size):
    """Weights survive any units and padding (of 7 ranks, some hold only padding); buffers are rank 0's."""
    paths = write_shards(tmp_path, model, world_size, wrappers)
    check_equal(imported(paths, tmp_path / "out"), model.weights())


def test_the_folder_is_a_checkpoint_of_ours(tmp_path):
    """It has a manifest with the number of shards and a checksum for each file, and no work folder beside it."""
    paths = write_shards(tmp_path, MODELS["nested units, flattened"], 3)
    manifest = import_fairscale(paths, tmp_path / "out")
    contents = read_contents(tmp_path / "out")
    assert contents.manifest == manifest
    assert (manifest.world_size, manifest.step) == (3, None)
    assert {file.state for file in contents.files} == {"ok"}
    assert {entry.key for entry in contents.tensors} == {
        f"model.{name}" for name in MODELS["nested units, flattened"].weights()
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", *(f"shard_{rank}.pt" for rank in range(3))]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("shared", "other"),
    [(("emb.weight", "head.weight"), "head.weight"), (("emb.kernel", "head.weight"), "head.kernel")],
    ids=["equal names", "names that fairscale swaps"],
)
@pytest.mark.parametrize("path", ["", "layers.0"])
def test_tied_weights_are_there_under_every_name(tmp_path, world_size, shared, other, path):
    """Ties work in any unit and with any names; fairscale's own consolidation fails on all of these."""
    tied = Unit(path, [Backing("flat_param_0", {"emb.weight": numbers(6, 2), "b": numbers(1)})], [shared])
    model = Model([tied, Unit("layers.1", [Backing("flat_param_0", FC)])])
    paths = write_shards(tmp_path, model, world_size)
    expected = model.weights() | {join(path, other): numbers(6, 2)}
    check_equal(imported(paths, tmp_path / "out"), expected)
    contents = read_contents(tmp_path / "out")
    assert contents.manifest.aliases == {join(path, other): join(path, "emb.weight")}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tied_weights_that_were_not_flattened_are_found_by_their_memory(tmp_path, world_size):
    """fairscale's metadata know one of the two names; the other key holds the same memory in every shard."""
    model = Model(
        [Unit("", [Backing("emb.weight", {"emb.weight": numbers(5, 3)})])], extra={"head.weight": "emb.weight"}
    )
    paths = write_shards(tmp_path, model, world_size)
    check_equal(imported(paths, tmp_path / "out"), model.weights() | {"head.weight": numbers(5, 3)})


# 20 elements on 3 ranks are 7, 7 and 6: the padding identifies the last rank, but not the other two.
REFUSED = {
    "a missing shard": (
        lambda paths: paths[:1] + paths[2:],
        r"shard_0\.pt to .*shard_2\.pt hold 13 elements .* has 20",
    ),
    "the last shard missing": (lambda paths: paths[:2], r"hold 14 elements of `flat_param_0`, which has 20: at least"),
    "a shard too many": (lambda paths: [*paths, paths[0] + "-copy"], "hold 27 elements .* there are too many"),
    "a shard twice": (lambda paths: [paths[0], paths[0], paths[2]], r"shard_0\.pt is given twice"),
    "another order": (
        lambda paths: [paths[2], paths[0] + "-copy", paths[1]],
        r"shard_2\.pt is in the place of rank 0",
    ),
    "numbers that fall": (lambda paths: [paths[1], paths[0], paths[2]], r"shard_1\.pt comes before .*shard_0\.pt"),
}


@pytest.mark.parametrize(("choose", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_shards_that_are_not_one_of_each_rank_in_order_are_refused(tmp_path, choose, message):
    """The error names the files; nothing is written."""
    paths = write_shards(tmp_path, MODELS["one flat parameter"], 3)
    (tmp_path / "shard_0.pt-copy").write_bytes((tmp_path / "shard_0.pt").read_bytes())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        import_fairscale(choose(paths), tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_shards_of_two_models_are_refused(tmp_path):
    """If sizes agree but a name differs, the error names the second file."""
    (tmp_path / "other").mkdir()
    one = write_shards(tmp_path, MODELS["one flat parameter"], 2)
    renamed = {name.replace("fc", "proj"): value for name, value in FC.items()}
    other = write_shards(tmp_path / "other", Model([Unit("", [Backing("flat_param_0", renamed)])]), 2)
    with pytest.raises(CheckpointError, match=r"other/shard_1\.pt describes other parameters than .*shard_0\.pt"):
        import_fairscale([one[0], other[1]], tmp_path / "out")


def test_parameters_of_each_rank_alone_are_refused(tmp_path):
    """Experts are whole on every rank but differ: importing one rank's would lose the others."""
    paths = write_shards(tmp_path, MODELS["a unit that every rank holds whole"], 2)
    found = torch.load(paths[1], weights_only=True)
    found["shard_weights"]["bn.flat_param_0"].add_(1)
    torch.save(found, paths[1])
    with pytest.raises(CheckpointError, match=r"`bn\.flat_param_0` is whole in every shard, .*shard_1\.pt has other"):
        import_fairscale(paths, tmp_path / "out")


def param_of(found):
    """What the metadata of a shard say of its only parameter."""
    return found["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]


def tie_to_nothing(found):
    """Tie a weight to one that is not there."""
    found["shard_metadata"]["param_metadata"][0]["shared_param_info"].append(("nowhere.weight", "head.weight"))


DAMAGES = {
    "there is no 'shard_metadata'": lambda found: found.pop("shard_metadata"),
    "`flat_param_0`, which is missing from its weights": lambda found: found["shard_weights"].clear(),
    "holds `stray`, but its metadata do not describe it": lambda found: found["shard_weights"].update(stray=numbers(3)),
    "names, shapes and sizes of `flat_param_0` do not fit": lambda found: param_of(found)["numels"].append(1),
    "has 1000 elements of padding in 10": lambda found: param_of(found).update(padding=1000),
    "`head.weight` is tied to `nowhere.weight`": tie_to_nothing,
    "list": lambda found: found.update(shard_metadata=[]),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_what_fairscale_does_not_write_is_refused_by_file(tmp_path, message):
    """Each kind of damage to the shards raises an error that names the first."""
    paths = write_shards(tmp_path, MODELS["one flat parameter"], 2)
    for path in paths:
        found = torch.load(path, weights_only=True)
        DAMAGES[message](found)
        torch.save(found, path)
    with pytest.raises(CheckpointError, match=message) as caught:
        import_fairscale(paths, tmp_path / "out")
    assert "shard_0.pt" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["malicious", "cut", "missing", "a changed byte in the pickle"])
def test_files_that_cannot_be_read_as_data_are_refused_by_name(tmp_path, how):
    """No code in a shard runs; the error names the damaged file."""
    paths = write_shards(tmp_path, MODELS["one flat parameter"], 2)
    shard, mark = tmp_path / "shard_1.pt", tmp_path / "mark"
    if how == "malicious":
        torch.save({"shard_weights": {"flat_param_0": Exploit(mark)}, "shard_metadata": {}}, shard)
    elif how == "cut":
        shard.write_bytes(shard.read_bytes()[:200])
    elif how == "missing":
        shard.unlink()
    else:
        change_byte(shard, at=shard.read_bytes().index(b"shard_weights") - 4)
    with pytest.raises(CheckpointError, match=r"shard_1\.pt must be a shard that fairscale saved"):
        import_fairscale(paths, tmp_path / "out")
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


def test_no_shards_are_a_value_error(tmp_path):
    """An empty list of shards raises a ValueError."""
    with pytest.raises(ValueError, match="one file per rank"):
        import_fairscale([], tmp_path / "out")
