"""The bar chart of a grammar suite: a group of bars a paradigm, one bar a run, with 95 % intervals and the line of chance."""

import io

from files import write_atomically


def bar_chart(path, values):
    """Write a PNG of what grammar.result made."""
    import matplotlib
    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    columns = values["results"]
    names = [*columns[0]["paradigms"], "overall"]
    height = 0.8 / len(columns)
    figure, axes = plt.subplots(figsize=(8, 0.6 + len(names) * max(0.22, 0.09 * len(columns))), layout="constrained")
    for number, column in enumerate(columns):
        intervals = [*column["paradigms"].values(), column["overall"]]
        means = [100 * interval["mean"] for interval in intervals]
        spread = [[100 * abs(interval[end] - interval["mean"]) for interval in intervals] for end in ("low", "high")]
        axes.barh([place + (number + 0.5) * height - 0.4 for place in range(len(names))], means, height, xerr=spread,
                  error_kw=dict(lw=0.6), label=f"{column['run']} ({column['scoring']})")
    axes.axvline(100 * values["chance"], color="grey", ls="--", lw=1, label="chance")
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="pairs right, %", xlim=(0, 100))
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.invert_yaxis()  # the first paradigm on top
    figure.legend(loc="outside upper center", ncols=2, fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    plt.close(figure)
    write_atomically(path, buffer.getvalue())
