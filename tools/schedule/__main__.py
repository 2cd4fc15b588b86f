"""``python -m tools.schedule``: draws a schedule, and prints its bubble, by theory and simulated, and the
activations that each stage holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_parallel.schedules.checks import validate
from lightning_parallel.schedules.named import SCHEDULES, Endless, asynchronous, placement_of
from lightning_parallel.schedules.simulate import simulate
from lightning_parallel.schedules.steady import mean_ahead, steady
from tools.schedule.costs import asynchronous_utilisation, full_span, peak_activations, utilisation
from tools.schedule.figures import clock_table

ENDLESS: dict[str, Endless] = {"async": "1f1b", "async_vhalf": "vhalf", "async_vmin": "vmin"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.schedule",
        description="Draw a pipeline schedule as text and print its bubble and the activations held.",
    )
    parser.add_argument("schedule", choices=[*SCHEDULES, *ENDLESS])
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--microbatches", type=int, help="per update (default: 1 for async, else 2 x stages)")
    parser.add_argument("--forward", type=float, default=1.0, help="duration of a forward (default: 1)")
    parser.add_argument("--backward", type=float, default=2.0, help="duration of a backward (default: 2)")
    parser.add_argument("--step", type=float, default=0.0, help="duration of an optimizer step (default: 0)")
    parser.add_argument("--latency", type=float, default=0.0, help="time a message takes (default: 0)")
    parser.add_argument("--updates", type=int, help="async: updates until the drain (default: 3 x stages)")
    parser.add_argument("--extra-in-flight", type=int, help="async: more forwards ahead on each link (default: 0)")
    parser.add_argument("--column", type=float, help="time per column (default: that of the shortest action)")
    parser.add_argument("--activation-memory", type=float, help="zbv: a part of what 1F1B holds (default: 1)")
    parser.add_argument("--width", type=int, help="cut the table at so many characters")
    options = parser.parse_args(arguments)
    try:
        print(_described(options))
    except ValueError as error:
        parser.error(str(error))


def _described(options: argparse.Namespace) -> str:
    name, stages, endless = options.schedule, options.stages, ENDLESS.get(options.schedule)
    if endless is not None:
        microbatches = 1 if options.microbatches is None else options.microbatches
        updates = 3 * stages if options.updates is None else options.updates
        extra = options.extra_in_flight or 0
        schedule = asynchronous(stages, microbatches, updates, extra, endless)
    else:
        if options.updates is not None or options.extra_in_flight is not None:
            raise ValueError(f"schedule={name}: --updates and --extra-in-flight belong to async.")
        microbatches = 2 * stages if options.microbatches is None else options.microbatches
        if options.activation_memory is not None and name != "zbv":
            raise ValueError(f"schedule={name}: --activation-memory belongs to zbv.")
        limit = {} if options.activation_memory is None else {"activation_memory": options.activation_memory}
        schedule = SCHEDULES[name](stages, microbatches, **limit)
    validate(schedule)
    simulation = simulate(schedule, options.forward, options.backward, options.step, options.latency)
    theory = 0.0 if endless else simulate(schedule).bubble
    if (endless == "vhalf" or endless == "vmin") and stages > 1:
        theory = 1 - steady(endless, stages, microbatches).busy
    lines = [
        f"{name}: {stages} stages, {microbatches} microbatches per update",
        "",
        clock_table(simulation, column=options.column, width=options.width),
        "",
        f"makespan          {simulation.makespan:g}",
        f"bubble            {simulation.bubble:.3f} simulated, {theory:.3f} by theory"
        + (" (steady state; simulated with fill and drain)" if endless else ""),
        f"activations held  {' '.join(map(str, peak_activations(schedule)))} microbatches, stage by stage",
    ]
    if endless:
        full = full_span(simulation)
        simulated = "(too few updates)" if full is None else f"{utilisation(simulation, *full):.3f}"
        equal = asynchronous_utilisation(stages, extra, options.forward, options.backward, options.latency)
        expected = 1 - theory if theory else equal
        chunks = range(len(placement_of(endless, stages)))
        means = [mean_ahead(endless, stages, c, microbatches, extra) / microbatches for c in chunks]
        lines += [
            f"stages busy       {simulated} simulated in the steady state, {expected:.3f} by theory",
            f"mean staleness    {' '.join(f'{mean:.3g}' for mean in means)} updates, chunk by chunk",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
