"""What torch.compile is asked for."""

import torch

from lingpt.train import train


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
