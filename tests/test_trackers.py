"""TensorBoard's and Weights & Biases' files, read back."""

from __future__ import annotations

import html
import json
import sys
import time
import urllib.request
from dataclasses import replace

import pytest
from helpers import losses, run_to_the_end, wait_for
from test_resume import Killed, kill_before_step
from training import NEW_RUN, ONE_PROCESS, config_of, resumed, train, trained

from support.checkpoints import manager
from support.cli import UserError
from support.console.log import read_log
from support.console.trackers import TensorBoard
from support.runtime import clock
from train_gpt2 import get_lr, main


@pytest.fixture(autouse=True)
def files_in_order(monkeypatch):
    """TensorBoard reads files in the order of their names, which end in the process's count of them: 9 after 10."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", type(event_file_writer._global_uid)(1000))


def curves(out):
    """The scalars of a run as TensorBoard shows them, {name: {step: value}}, and the accumulator itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    for name, points in scalars.items():
        assert len(dict(points)) == len(points), f"a step of {name} twice"
    return {name: dict(points) for name, points in scalars.items()}, events


def flags_of(events):
    [text] = events.Tensors("flags/text_summary")
    return json.loads(text.tensor_proto.string_val[0])


def records(path):
    """The records of a .wandb file: a header of 7 bytes, then the format of LevelDB's log, blocks of 32 kB."""
    content, position, record = path.read_bytes(), 7, b""
    assert content[:4] in (b":W&B", b"")
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        size, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        if position + 7 + size > len(content):  # it is just being written
            return
        record += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of one
            yield record
            record = b""


def history(out):
    """The values in wandb's offline files, {name: {step: value}}, the configuration, the final values, the ids.

    wandb's process may write them a moment after the run.
    """
    assert wait_for(lambda: "loss/train" in _history(out)[2])
    return _history(out)


def _history(out):
    from wandb.proto import wandb_internal_pb2

    found, config, summary, ids = {}, {}, {}, set()

    def values(items):
        return {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in items}

    for path in sorted((out / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in map(wandb_internal_pb2.Record.FromString, records(path)):
            if record.HasField("run"):
                ids.add((record.run.project, record.run.run_id))
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.HasField("history"):
                items = values(record.history.item)
                for name, value in items.items():
                    found.setdefault(name, {})[items["step"]] = value
            elif record.HasField("summary"):
                summary |= values(record.summary.update)
    return found, config, summary, ids


def check_against_the_log(shown, out, config):
    log = read_log(out / "log.txt")
    for name, curve in (("train", "loss/train"), ("val", "loss/val"), ("lr", "update/lr"), ("norm", "update/norm")):
        assert shown[curve] == pytest.approx(log[name], abs=1e-4 if name == "val" else 1e-6)
    assert log["lr"] == {step: pytest.approx(get_lr(step, config)) for step in range(config.max_steps)}
    speeds = {step: config.total_batch_size / seconds for step, seconds in log["seconds"].items()}
    assert shown["speed/tokens_per_second"] == pytest.approx(speeds)
    assert "speed/mfu" not in shown  # a CPU's peak is not known


def test_tensorboard_has_curves_samples_and_flags(byte_shards, tmp_path):
    flags = ["--data", byte_shards, "--max-steps", 8, "--sample-every", 8, "--prompt", "7 + 5", "--tensorboard"]
    run_to_the_end(*flags, "--out", "run", cwd=tmp_path, world_size=2)
    out, config = tmp_path / "run", config_of(*flags)
    shown, events = curves(out)
    check_against_the_log(shown, out, config)
    [sample] = events.Tensors("sample/0/text_summary")
    assert sample.step == 8 and sample.tensor_proto.string_val[0].decode().startswith("    7 + 5")
    flags_shown = flags_of(events)
    assert flags_shown["max_lr"] == config.max_lr and flags_shown["optimizer"] == "adamw"


def test_tensorboard_follows_a_run(byte_shards, tmp_path):
    """Its reader in Python goes from one file of a folder to the next, and does not come back."""
    tracker = TensorBoard(config_of("--data", byte_shards, "--out", tmp_path), 0)
    tracker.log(0, {"loss": 4.0})
    tracker.flush()
    values, events = curves(tmp_path)
    assert values == {"loss": {0: 4.0}}
    tracker.log(1, {"loss": 2.0})
    tracker.flush()
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 4.0), (1, 2.0)]
    tracker.close(True)


def test_tensorboard_shows_a_sample_as_it_is(byte_shards, tmp_path):
    """Its page reads Markdown, where __init__ is bold and a single line break is a space."""
    from tensorboard import plugin_util

    sample = "def __init__(self):\n\n  *x*\n\n- 1. <b>\n"
    tracker = TensorBoard(config_of("--data", byte_shards, "--out", tmp_path), 0)
    tracker.log_samples(0, [sample])
    tracker.close(True)
    [shown] = curves(tmp_path)[1].Tensors("sample/0/text_summary")
    page = plugin_util.markdown_to_safe_html(shown.tensor_proto.string_val[0])
    assert page == f"<pre><code>{html.escape(sample)}</code></pre>"


@pytest.mark.slow
def test_a_resumed_run_continues_the_same_curves(byte_shards, tmp_path, monkeypatch):
    """Killed at step 6, with its last checkpoint at 4: steps 4 and 5 run twice, and are shown once."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "run"
    flags = ["--data", byte_shards, "--out", out, "--max-steps", 9, "--checkpoint-every", 4]
    flags += ["--tensorboard", "--wandb", "mine"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_before_step(patch, 6)
        train(config_of(*flags), ONE_PROCESS, NEW_RUN)
    resumed(out)
    config = config_of(*flags)
    shown, _ = curves(out)
    check_against_the_log(shown, out, config)
    found, flags_shown, summary, ids = history(out)
    check_against_the_log(found, out, config)
    assert len(ids) == 1 and {project for project, _ in ids} == {"mine"}
    assert flags_shown["max_lr"] == config.max_lr and flags_shown["n_layer"] == 2
    assert summary["loss/train"] == pytest.approx(losses(out / "log.txt")[-1], abs=1e-5)


def hparams_page(logdir):
    """The rows of TensorBoard's HPARAMS page, as its own server answers: {run: (flags, metrics)}, and its columns."""
    from tensorboard import program

    server = program.TensorBoard()
    server.configure(argv=[None, "--logdir", str(logdir), "--port", "0", "--load_fast", "false"])
    url = server.launch()

    def ask(name, **body):
        request = urllib.request.Request(
            f"{url}data/plugin/hparams/{name}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return json.load(urllib.request.urlopen(request, timeout=60))

    assert wait_for(lambda: ask("experiment").get("hparamInfos"))
    experiment = ask("experiment")
    columns = {info["name"] for info in experiment["hparamInfos"]}
    metrics = [{"metric": info["name"]} for info in experiment["metricInfos"]]
    flags = [{"hparam": name} for name in columns]
    groups = ask("session_groups", allowedStatuses=["STATUS_UNKNOWN"], colParams=metrics + flags, sliceSize=100)
    rows = {}
    for group in groups["sessionGroups"]:
        values = {metric["name"]["tag"]: metric["value"] for metric in group["metricValues"]}
        rows[group["name"]] = group["hparams"], values
    return rows, columns


@pytest.mark.slow
def test_tensorboards_hparams_page_compares_runs_by_flags_and_losses(byte_shards, tmp_path, monkeypatch):
    """Three runs: of one kind, of another kind that has more values and flags, and one that was killed and resumed."""
    flags = ["--data", byte_shards, "--tensorboard", "--max-steps", 9, "--val-every", 2]
    trained(
        tmp_path / "plain", *flags, "--max-lr", 0.5, "--decay-steps", 99
    )  # so high that the last loss is not the best
    with monkeypatch.context() as patch:
        patch.setattr("support.runtime.devices.peak_flops", lambda *_: 1e12)
        trained(tmp_path / "muon", *flags, "--optimizer", "muon", "--adamw-lr", 2e-3)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_before_step(patch, 6)
        train(
            config_of(*flags, "--max-lr", 0.25, "--out", tmp_path / "killed", "--checkpoint-every", 3),
            ONE_PROCESS,
            NEW_RUN,
        )
    rows, _ = hparams_page(tmp_path)
    assert rows["killed/tensorboard"][0]["val_every"] == 2 and "loss/best_val" in rows["killed/tensorboard"][1]
    resumed(tmp_path / "killed", "--val-every", 3)
    rows, columns = hparams_page(tmp_path)
    assert rows.keys() == {"plain/tensorboard", "muon/tensorboard", "killed/tensorboard"}
    assert {"max_lr", "adamw_lr", "n_layer", "data"} <= columns
    for name, (shown, values) in rows.items():
        log = read_log(tmp_path / name.split("/")[0] / "log.txt")
        assert values["loss/train"] == pytest.approx(log["train"][8], abs=1e-5)
        assert values["loss/val"] == pytest.approx(log["val"][9], abs=1e-4)
        assert values["loss/best_val"] == pytest.approx(min(log["val"].values()), abs=1e-4)
        assert shown["optimizer"] == ("muon" if "muon" in name else "adamw") and shown["bias"] == "True"
    best, last = (rows["plain/tensorboard"][1][name] for name in ("loss/best_val", "loss/val"))
    assert best < last
    assert rows["muon/tensorboard"][0]["adamw_lr"] == 2e-3 and "speed/mfu" in rows["muon/tensorboard"][1]
    assert rows["killed/tensorboard"][0]["val_every"] == 3  # of the last start


def test_a_checkpoint_is_not_ahead_of_its_curves(byte_shards, tmp_path, monkeypatch):
    """On a slow disk. The model card is written last: TensorBoard can show all steps before it then."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    seen, card, write = {}, manager.model_card, RecordWriter.write
    monkeypatch.setattr(RecordWriter, "write", lambda self, data: time.sleep(0.05) or write(self, data))

    def model_card(run, step, *values):
        seen[step] = {*curves(tmp_path)[0]["loss/train"]}
        return card(run, step, *values)

    monkeypatch.setattr(manager, "model_card", model_card)
    trained(tmp_path, "--data", byte_shards, "--tensorboard", "--max-steps", 6, "--checkpoint-every", 3)
    assert {*range(3)} <= seen[3] and {*range(6)} == seen[6]


def test_a_timed_run_has_no_flags_that_count_steps(byte_shards, tmp_path, monkeypatch):
    """It has no --max-steps: 6 seconds, of which 4 are kept for the end, and 1.8 are over."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = ["--data", byte_shards, "--out", tmp_path, "--checkpoint-every", 0, "--tensorboard", "--wandb"]
    config = replace(config_of(*flags), minutes=0.1)
    monkeypatch.setattr(clock, "STARTED", time.perf_counter() - 1.8)
    train(config, ONE_PROCESS, NEW_RUN)
    _, events = curves(tmp_path)
    for flags in (flags_of(events), history(tmp_path)[1]):
        assert "minutes" in flags and not {"max_steps", "decay_steps", "warmup_steps"} & {*flags}


def test_a_run_that_is_started_over_starts_new_curves(byte_shards, tmp_path, monkeypatch):
    flags = ["--data", byte_shards, "--checkpoint-every", 0, "--resume", "auto", "--tensorboard"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_before_step(patch, 4)
        trained(tmp_path, *flags, "--max-steps", 6)
    monkeypatch.setattr("support.runtime.devices.peak_flops", lambda *_: 1e12)
    trained(tmp_path, *flags, "--max-steps", 3)
    shown, _ = curves(tmp_path)
    assert shown["loss/train"].keys() == {0, 1, 2} == shown["speed/mfu"].keys()


def test_curves_that_cannot_be_written_end_and_training_does_not(byte_shards, tmp_path, monkeypatch, capsys):
    from torch.utils.tensorboard import SummaryWriter

    add_scalar = SummaryWriter.add_scalar

    def disk_full(self, name, value, step):
        if step == 2:
            raise OSError(28, "No space left on device")
        add_scalar(self, name, value, step)

    monkeypatch.setattr(SummaryWriter, "add_scalar", disk_full)
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 5, "--tensorboard")
    assert len(losses(tmp_path / "run" / "log.txt")) == 5
    warning = "warning: --tensorboard stopped ([Errno 28] No space left on device). Training continues without it.\n"
    assert capsys.readouterr().err.count(warning) == 1


@pytest.mark.slow
@pytest.mark.parametrize("flag, package", [("--tensorboard", "tensorboard"), ("--wandb", "wandb")])
def test_a_missing_package_is_found_before_anything_is_made(byte_shards, tmp_path, monkeypatch, flag, package):
    """Also that of a run that is resumed or forked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trained(tmp_path / "run", "--data", byte_shards, "--max-steps", 2, "--checkpoint-every", 1, flag)
    monkeypatch.setitem(sys.modules, package, None)  # an import fails
    (tmp_path / "text.txt").write_text("a text\n" * 9999)
    names = {path.name for path in tmp_path.iterdir()}
    wanted = f"^{flag} needs a package that is not installed. Run pip install {package}.$"
    for flags in (
        ["--text", "text.txt", "--minutes", "1", "--out", "new", flag],
        ["--init-from", "nosuch/model", "--out", "new", flag],
        ["--resume", "--out", "run"],
        ["--fork", "run/model_00001", "--out", "new"],
    ):
        with pytest.raises(UserError, match=wanted):
            main(flags)
    main(["--plan", flag])
    assert {path.name for path in tmp_path.iterdir()} == names


def test_wandb_that_cannot_start_is_one_line(byte_shards, tmp_path, monkeypatch):
    import wandb

    def refuse(**options):
        raise wandb.errors.UsageError("no API key configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(
        UserError, match="^--wandb cannot start: no API key configured. Run wandb login, or set WANDB_MODE=offline.$"
    ):
        trained(tmp_path / "run", "--data", byte_shards, "--wandb")
