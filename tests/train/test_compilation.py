"""What torch.compile is asked for, and what comes of it on a CPU."""

import pytest
import torch

from lingpt.common.run_folder import read_metrics
from lingpt.models import ModelArgs
from lingpt.train import loop, train
from lingpt.train.loop import Run


@pytest.mark.slow
def test_the_recommended_form_trains_compiled_as_it_does_eagerly(make_recipe, monkeypatch):
    """By Inductor, as on a GPU: the operator, the convolution, the gates, softmax between."""
    monkeypatch.setattr(loop, "validate", lambda *_: (4.0, [4.0]))  # would compile as much again
    losses = []
    for when in ("always", "never"):
        recipe = make_recipe(name=when, max_steps=3, compile=when)
        recipe.model = ModelArgs("demo", "hybrid + softmax_every=2", n_layer=2)
        folder = train(recipe)
        losses.append([line["loss"] for line in read_metrics(folder) if line["kind"] == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_deterministic_run_s_kernels_are_not_chosen_by_timing(make_recipe, monkeypatch):
    """Of blocks and loss alike: two processes would time, and choose, differently."""
    asked, compile = [], torch.compile

    def checked(function, **options):
        compile(function, **options)  # raises an error for an option that Inductor does not know
        asked.append(options.get("options"))
        return function

    monkeypatch.setattr(torch, "compile", checked)
    for deterministic, options in ((False, None), (True, {"deterministic": True})):
        recipe = make_recipe(
            name=f"{deterministic}", max_steps=1, compile="always", deterministic=deterministic
        )
        train(recipe)
        assert asked == [options] * (recipe.model.config().n_layer + 1)
        asked.clear()


def test_compiling_is_no_training_time(make_recipe, monkeypatch):
    """Guards: on a CPU `--train.compile always` compiled on the clock. `never` starts without a warm-up."""
    before_the_first_step, step, calls = {}, Run.step, []

    def first_step(self, stop):
        before_the_first_step.setdefault(self.folder.name, len(calls) > 0)
        return step(self, stop)

    def compile(function, **_):
        def compiled(*args, **kwargs):
            calls.append(function)
            return function(*args, **kwargs)

        return compiled

    monkeypatch.setattr(Run, "step", first_step)
    monkeypatch.setattr(torch, "compile", compile)
    losses = []
    for when in ("never", "always"):
        folder = train(make_recipe(name=when, max_steps=2, compile=when))
        losses.append([line["loss"] for line in read_metrics(folder)])
    assert before_the_first_step == {"never": False, "always": True} and losses[0] == losses[1]
