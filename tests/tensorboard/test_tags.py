"""Tags are a public contract: a real run with every hook that observes writes those of the snapshot, and no others."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp

SNAPSHOT = Path(__file__).with_name("tags.txt")
HOOKS = sorted(path.stem for path in (Path(exp.__file__).parent / "conf" / "hooks").glob("*.yaml"))
# They change gradients or outputs, and log nothing.
TRANSFORMS = {"clip_module", "gradient_reversal", "scale_gradient"}
# fp16 for its scale, two terms for their tags, and every kind of page.
OVERRIDES = [
    f"hooks=[{','.join(name for name in HOOKS if name not in TRANSFORMS)}]",
    "precision=fp16",
    "objective=[cross_entropy]",
    "+objective.second={_target_: torch.nn.MultiMarginLoss}",
    "model.layers.hidden.out_features=8",
    "model.layers.hidden2.out_features=8",
    "trainer.max_epochs=3",
    "logger.tensorboard.graph=true",
]


def test_every_tag_of_the_snapshot_is_in_the_event_file_of_a_real_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = exp.fit(exp.compose(OVERRIDES))
    read = EventAccumulator(str(Path(report.directory) / "tensorboard")).Reload()
    tags = read.Tags()
    found = sorted(tags["scalars"] + tags["histograms"] + tags["images"] + tags["tensors"])
    # `git` is there only inside a repository.
    found = [tag for tag in found if tag != "git"]
    assert found == SNAPSHOT.read_text().split(), (
        "write the new tags into tags.txt, docs/tensorboard.md and CHANGELOG.md"
    )
    assert tags["graph"]
