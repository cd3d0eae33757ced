"""Figures of a comparison of in-context runs: numbers of icl_shift.py in, PNG files out.

results: {scorer: [the result of one run, of the next seed, ...]}. Lines are means over seeds, bands their 95 % intervals. A
cell with a dot has positions that training never reached; a grey cell lies beyond the position table. Dashed: baselines.
More than four scorers stand in rows of four.
"""

import io

import matplotlib

matplotlib.use("Agg")  # no screen needed
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm

from files import write_atomically
from intervals import t_interval


def draw_all(results, folder):
    """Write every figure that the task has; -> the file names."""
    first = next(iter(results.values()))[0]
    figures = [name for name in ("lengths", "deciders", "outlier", "interventions", "functions", "collapse") if name in first]
    for name in figures:
        save(globals()[name](results), folder / f"{name}.png")
    if "functions" in first:
        save(examples(results), folder / "examples.png")
        figures.append("examples")
    save(pictures(results), folder / "weights.png")
    return [f"{name}.png" for name in figures + ["weights"]]


def save(figure, path):
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=80, format="png")
    plt.close(figure)
    write_atomically(path, buffer.getvalue())


def panels(rows, columns, width=3.2, height=2.7, **options):
    return plt.subplots(rows, columns, figsize=(width * columns + 0.6, height * rows + 0.3), layout="constrained",
                        squeeze=False, **options)


def panels_of(results, rows=1, **options):
    """For each scorer its axes (rows,): scorers stand side by side, four at most, the next four below; -> figure, a list."""
    columns = min(len(results), 4)
    figure, axes = panels(rows * -(-len(results) // columns), columns, **options)
    for ax in axes.flat:
        ax.set_visible(False)
    chosen = [axes[rows * (i // columns):rows * (i // columns + 1), i % columns] for i in range(len(results))]
    for ax in np.concatenate(chosen):
        ax.set_visible(True)
    return figure, chosen


def legend(figure, ax):
    """To the right of all panels, where it covers no line."""
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper", fontsize="small")


def band(axes, x, runs, label, number):
    """The mean of several curves (seeds, len(x)), and its interval where there are several. number: of the line in its panel;
    the first is the thickest, so that it shows below another that lies on it."""
    found, color = [t_interval(values) for values in zip(*runs)], colour(number)
    axes.plot(x, [i["mean"] for i in found], marker="o", ms=3, lw=thickness(number), label=label, color=color)
    if len(runs) > 1:
        axes.fill_between(x, [i["low"] for i in found], [i["high"] for i in found], alpha=0.15, color=color, lw=0)


def colour(number):
    return f"C{number + (number >= 7)}"  # C7 is grey, as baselines are


def thickness(number):
    return max(1, 4 - 1.5 * number)


def mean_grid(runs, cells_of, value_of, row, column):
    """Mean over seeds of a value of each cell, as (rows, columns, grid); NaN where there is none."""
    cells = [cells_of(run) for run in runs]
    rows, columns = (sorted({cell[key] for cell in cells[0]}) for key in (row, column))
    grid = np.full((len(rows), len(columns)), np.nan)
    for same in zip(*cells):
        values = [value_of(cell) for cell in same]
        if None not in values:
            grid[rows.index(same[0][row]), columns.index(same[0][column])] = np.mean(values)
    return rows, columns, grid


def heat_map(axes, rows, columns, grid, norm, text):
    axes.set_facecolor("0.8")
    image = axes.imshow(grid, norm=norm, cmap="viridis", aspect="auto", origin="lower")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    for i, j in np.ndindex(grid.shape):
        if np.isfinite(grid[i, j]):
            axes.text(j, i, text(grid[i, j]), ha="center", va="center", fontsize=7, color=readable(image, grid[i, j]))
    return image


def readable(image, value):
    """Black on bright cells, white on dark ones."""
    return "k" if np.dot(image.cmap(image.norm(value))[:3], (0.299, 0.587, 0.114)) > 0.5 else "w"


def short(value):
    """Five characters at most: 0.012, 3.4, 56, 8e-3, 1e4."""
    return f"{value:.2g}" if 0.01 <= value < 99.5 else f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")


# ------------------------------------------------------------------------------------------------------------ quantifiers

def lengths(results):
    figure, axes = panels_of(results)
    for (ax,), (scorer, runs) in zip(axes, results.items()):
        rows, columns, grid = mean_grid(runs, lambda run: run["lengths"], lambda cell: cell["error"], "length", "sigma")
        image = heat_map(ax, rows, columns, 100 * grid, plt.Normalize(0, 60), lambda value: f"{value:.0f}")
        for cell in runs[0]["lengths"]:
            if not cell["trained"] and cell["error"] is not None:
                i, j = rows.index(cell["length"]), columns.index(cell["sigma"])
                ax.plot(j + 0.35, i + 0.35, ".", color=readable(image, 100 * grid[i, j]), ms=2)
        ax.set(title=scorer, xlabel="standard deviation of x", ylabel="length")
    constant = {cell["constant_true"] for cell in results[scorer][0]["lengths"] if cell["error"] is not None}
    figure.colorbar(image, ax=figure.axes, label=f"wrong, % (constant: {100 * min(constant):.0f})")
    return figure


def deciders(results):
    figure, axes = panels(1, 3)
    for number, scorer in enumerate(results):
        tests = [run["deciders"] for run in results[scorer]]
        numbers = [cell["number"] for cell in tests[0]["by_number"]]
        band(axes[0, 0], range(len(numbers)), [[100 * c["error"] for c in t["by_number"]] for t in tests], scorer, number)
        for ax, part in ((axes[0, 1], "own"), (axes[0, 2], "last")):
            places = [cell["place"] for cell in tests[0]["by_place"]]
            band(ax, places, [[100 * c[part] for c in t["by_place"]] for t in tests], scorer, number)
    axes[0, 0].set_xticks(range(len(numbers)), numbers)
    axes[0, 0].set(xlabel="deciders (0: a constant may be right)", ylabel="wrong at the last point, %")
    axes[0, 1].set(xlabel="place of a single decider", ylabel="wrong at the decider, %")
    axes[0, 2].set(xlabel="place of a single decider", ylabel="wrong at the last point, %")
    legend(figure, axes[0, 0])
    return figure


# What outlier() in icl_shift.py tells apart, and how often a constant answer is wrong there.
PARTS = {"before": ("before the outlier", 50), "own": ("at a harmless outlier", 50), "sign": ("deciding or not", 50),
         "after": ("behind a harmless outlier", 50), "missed": ("behind a deciding outlier", None)}


def outlier(results):
    figure, axes = panels(1, len(PARTS), width=3, sharey=True)
    for ax, (part, (title, constant)) in zip(axes[0], PARTS.items()):
        for number, scorer in enumerate(results):
            runs = [[100 * e for e in run["outlier"]["summary"][part]] for run in results[scorer]]
            band(ax, results[scorer][0]["outlier"]["magnitudes"], runs, scorer, number)
        if constant:
            ax.axhline(constant, color="grey", ls="--", lw=1, label="a constant answer")
        ax.set(title=title, xscale="log", ylim=(-3, 103))
    axes[0, 0].set_ylabel("wrong, %")
    figure.supxlabel("magnitude of the outlier", fontsize="medium")
    legend(figure, axes[0, 0])
    return figure


def interventions(results):
    shown = ("own", "sign", "after", "missed")
    figure, axes = panels(len(results), len(shown), width=3, height=2.2, sharex=True, sharey=True)
    for row, (scorer, runs) in zip(axes, results.items()):
        for ax, part in zip(row, shown):
            tests = {"unchanged": [run["outlier"]["summary"] for run in runs]}
            tests |= {name: [run["interventions"][name]["outlier"] for run in runs] for name in runs[0]["interventions"]}
            for i, (name, found) in enumerate(tests.items()):
                band(ax, runs[0]["outlier"]["magnitudes"], [[100 * e for e in one[part]] for one in found], name, i)
            if part != "missed":
                ax.axhline(50, color="grey", ls="--", lw=1)
            ax.set(xscale="log", ylim=(-3, 103))
        row[0].set_ylabel(f"{scorer}: wrong, %")
        row[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))  # softmax is swapped for another scorer
    for part, ax in zip(shown, axes[0]):
        ax.set_title(PARTS[part][0])
    figure.supxlabel("magnitude of the outlier", fontsize="medium")
    return figure


# ----------------------------------------------------------------------------------------------------------------- linear

def functions(results):
    """Above: mean squared error; below: relative to the variance of y."""
    shown = {scorer: (runs, "model") for scorer, runs in results.items()}
    shown |= {name: (next(iter(results.values())), name) for name in ("3 nearest", "averaging")}
    figure, axes = panels(2, len(shown))
    for column, (name, (runs, key)) in enumerate(shown.items()):
        for ax, divide, norm in ((axes[0, column], False, LogNorm(1e-3, 1e4)), (axes[1, column], True, LogNorm(1e-4, 1e1))):
            rows, columns, grid = mean_grid(runs, lambda run: run["functions"]["cells"],
                                            lambda cell: cell[key] / (cell["variance"] if divide else 1), "sigma_f", "sigma_x")
            image = heat_map(ax, rows, columns, np.maximum(grid, norm.vmin), norm, short)
            ax.set(title=f"{name}{', relative' if divide else ''}", xlabel="sigma_x", ylabel="" if column else "sigma_f")
            if column == len(shown) - 1:
                figure.colorbar(image, ax=axes[int(divide)], label="error / variance of y (zero: 1)" if divide else
                                "squared error (least squares: 0)")
    return figure


def examples(results):
    """A thin line a seed: an interval of two seeds reaches below 0, which these axes do not show."""
    wanted = ((1, 1), (3, 1), (1, 3), (10, 10))
    figure, axes = panels(1, len(wanted))
    for ax, (sigma_x, sigma_f) in zip(axes[0], wanted):
        for number, scorer in enumerate(results):
            runs = [cell for run in results[scorer] for cell in run["functions"]["by_examples"]
                    if (cell["sigma_x"], cell["sigma_f"]) == (sigma_x, sigma_f)]
            errors = np.array([run["model"] for run in runs])  # (seeds, examples)
            ax.plot(errors.mean(0), lw=thickness(number), label=scorer, color=colour(number))
            ax.plot(errors.T, lw=0.5, color=colour(number))
        for name, style in (("zero", ":"), ("3 nearest", "--"), ("averaging", "-."), ("least squares", "-")):
            ax.plot(runs[0][name], color="grey", ls=style, lw=1, label=name)
        reached = results[scorer][0]["functions"]["trained"]
        if not all(reached):
            ax.axvspan(reached.index(False), len(reached) - 1, color="0.9", label="never trained")
        ax.set(title=f"sigma_x {sigma_x}, sigma_f {sigma_f}", xlabel="examples seen", yscale="log",
               ylim=(1e-4, 1e3 * sigma_x * sigma_f))
    axes[0, 0].set_ylabel("squared error")
    legend(figure, axes[0, 0])
    return figure


# -------------------------------------------------------------------------------------------------------------- attention

def collapse(results):
    """One line a head, coloured by layer: seeds are averaged."""
    figure, axes = panels_of(results, 3, height=2.2)
    rows = ((0, "by_magnitude", "magnitude", "effective", "tokens in effect"),
            (1, "by_magnitude", "magnitude", "on_outlier", "weight on the outlier"),
            (2, "by_factor", "factor", "effective", "tokens in effect"))
    for column, (scorer, runs) in zip(axes, results.items()):
        for row, test, key, measure, label in rows:
            x = [point[key] for point in runs[0]["collapse"][test]]
            y = np.mean([[point["behind"][measure] for point in run["collapse"][test]] for run in runs], 0)  # (x, layers, H)
            for layer, head in np.ndindex(y.shape[1:]):
                column[row].plot(x, y[:, layer, head], color=plt.cm.plasma(layer / y.shape[1]), lw=1,
                                 label=f"layer {layer + 1}" if head == 0 else None)
            column[row].set(xscale="log", ylabel=label, title=scorer if row == 0 else None,
                            xlabel="magnitude of the outlier" if key == "magnitude" else "factor on all scores")
            column[row].set_ylim(0, 1.05 * max(y.max(), 0.1))
    legend(figure, axes[0][0])
    return figure


def pictures(results):
    """What the last query attends to: a row a head, a column a token, for three sizes of the outlier; the first seed."""
    shown = (0, 2, 6)
    figure, axes = panels(len(results), len(shown), width=3.6, height=1.9)
    for row, (scorer, runs) in zip(axes, results.items()):
        for ax, point in zip(row, (runs[0]["collapse"]["by_magnitude"][i] for i in shown)):
            weights = np.array(point["picture"])  # (layers, H, tokens)
            image = ax.imshow(weights.reshape(-1, weights.shape[-1]), vmin=0, vmax=1, cmap="magma", aspect="auto")
            ax.set(title=f"{scorer}, outlier {point['magnitude']:g}", xlabel="token", ylabel="layer, head")
            for layer in range(1, weights.shape[0]):
                ax.axhline(layer * weights.shape[1] - 0.5, color="w", lw=0.5)
    figure.colorbar(image, ax=axes, label="weight")
    return figure
