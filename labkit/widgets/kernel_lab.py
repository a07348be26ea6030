"""`KernelLab`: the L2 and the memory under one attention launch, with its buttons, pictures and verdicts."""

from __future__ import annotations

import threading
from typing import Any

import ipywidgets as ipw

from labkit import format as fmt
from labkit.errors import LabkitError, OutOfRangeError
from labkit.figures import kernel_lab as pictures
from labkit.figures.tables import make_table
from labkit.measure.card_ceilings import measure_ceilings
from labkit.measure.kernel_lab import Count, LabResult, LabSettings, card_count, lab_settings, run_lab
from labkit.measure.l2_claims import ClaimVerdict, judge_claims
from labkit.measure.roofline import Ceilings
from labkit.specs.gpu_catalogue import catalogue_gpu, gpu_names
from labkit.widgets.parts import Chart, DataTable, PlotlyLibrary, Screen, TextLine

DTYPES = ("bfloat16", "fp8", "int8_per_token_head", "float16")
GROUPS = (1, 2, 4, 8)
MAX_BLOCK_SIZES = 12
NUM_CLAIMS = 4


class KernelLab(ipw.VBox):
    """Counts one decode step over block sizes, head packing and shared prefixes, and judges what is said about them.

    Args:
        card: a catalogue name, or "auto" for the card that is here.
        otherwise: the card that is simulated where "auto" finds none.
        count: gives the counters of a launch on that card; None measures where it is here and simulates elsewhere.
        settings: `LabSettings` fields to begin with.
    """

    def __init__(
        self, card: str = "auto", *, otherwise: str = "H100", count: Count | None = None, **settings: Any
    ) -> None:
        self._settings = lab_settings(card, otherwise, **settings)
        self._count, self._own_card = count or card_count(self._settings.gpu), self._settings.gpu.name
        self._is_here = count is None and self._count is not None
        self._ceilings: Ceilings | None = None
        self._lock = threading.RLock()
        self.result: LabResult | None = None
        self.verdicts: tuple[ClaimVerdict, ...] = ()
        self._make_controls()
        self.screen, self.chart, self.heat = Screen(), Chart(), Chart()
        self.status, self.conclusion = TextLine(role="status"), TextLine(role="status", classes=("lk-answer",))
        self.claims = tuple(TextLine() for _ in range(NUM_CLAIMS))
        self.table = DataTable(folded="the numbers as a table")
        rows = [
            ipw.Box([self.card, self.num_seqs, self.context_len, self.kv_cache_dtype]),
            ipw.Box([self.group, self.prefix_percent, self.block_sizes, self.run_button]),
        ]
        for row in rows:
            row.add_class("lk-bar")
        super().__init__([PlotlyLibrary(), self.screen, *rows, self.status, self.conclusion, self.chart, self.heat,
                          *self.claims, self.table])  # fmt: skip
        self.add_class("lk-panel")
        self.run_button.on_click(lambda _: self.run())
        self.screen.observe(lambda _: self._draw(), ["theme", "narrow"])
        self._draw()

    def _make_controls(self) -> None:
        start, style = self._settings, {"description_width": "initial"}
        cards = [name for name in gpu_names() if catalogue_gpu(name).l2_bytes]
        if start.gpu.name not in cards:
            cards = [start.gpu.name, *cards]
        dtypes = DTYPES if start.kv_cache_dtype in DTYPES else (start.kv_cache_dtype, *DTYPES)
        groups = GROUPS if start.group in GROUPS else tuple(sorted((start.group, *GROUPS)))
        self.card = ipw.Dropdown(options=cards, value=start.gpu.name, description="card", style=style)
        self.num_seqs = ipw.BoundedIntText(start.num_seqs, min=1, max=256, description="sequences", style=style)
        self.context_len = ipw.BoundedIntText(
            start.context_len, min=1, max=131072, description="tokens each", style=style
        )
        self.kv_cache_dtype = ipw.Dropdown(
            options=dtypes, value=start.kv_cache_dtype, description="kv_cache_dtype", style=style
        )
        self.group = ipw.Dropdown(
            options=groups, value=start.group, description="query heads of a KV head", style=style
        )
        self.prefix_percent = ipw.IntSlider(
            round(100 * start.prefix_share), min=0, max=100, step=5, description="shared prefix, %", style=style,
            continuous_update=False,
        )  # fmt: skip
        self.block_sizes = ipw.Text(
            ", ".join(str(size) for size in start.block_sizes), description="block_size", style=style,
            layout=ipw.Layout(min_width="250px"),
        )  # fmt: skip
        self.run_button = ipw.Button(description="Run", button_style="primary")

    def settings(self) -> LabSettings:
        """What the controls say.

        Raises:
            LabkitError: block sizes that are none.
        """
        words = [word.strip() for word in self.block_sizes.value.split(",") if word.strip()]
        if not 1 <= len(words) <= MAX_BLOCK_SIZES or not all(word.isdecimal() and len(word) < 5 for word in words):
            raise OutOfRangeError(
                f"block_size takes 1 to {MAX_BLOCK_SIZES} whole numbers, separated by commas", works="8, 16, 32",
                knob="block_size",
            )  # fmt: skip
        own = self.card.value == self._own_card
        return LabSettings(
            self._settings.gpu if own else catalogue_gpu(self.card.value), num_seqs=self.num_seqs.value,
            context_len=self.context_len.value, kv_cache_dtype=self.kv_cache_dtype.value, group=self.group.value,
            num_kv_heads=self._settings.num_kv_heads, head_dim=self._settings.head_dim,
            prefix_share=self.prefix_percent.value / 100, block_sizes=tuple(sorted({int(word) for word in words})),
            prefix_shares=self._settings.prefix_shares,
        )  # fmt: skip

    def run(self) -> None:
        """Count every point and show what came out; an error stands in the status line."""
        with self._lock:
            self.run_button.disabled = True
            try:
                settings = self.settings()
                count = self._count if self.card.value == self._own_card else None
                own = count is not None and self._is_here
                if own and self._ceilings is None:
                    self._ceilings = measure_ceilings()
                self.result = run_lab(settings, count, self._show_progress, self._ceilings if own else None)
                self.verdicts = judge_claims(self.result)
                made = len(self.result.lines) + len(self.result.heat)
                self.status.say(f"{fmt.count(made)} launches, {self.result.method.split(' ')[0]}.")
            except LabkitError as error:
                self.status.say(str(error), "bad")
            finally:
                self.run_button.disabled = False
            self._draw()

    def _show_progress(self, done: int, total: int) -> None:
        if done % 8 == 0:
            self.status.say(f"{fmt.count(done)} of {fmt.count(total)} launches", progress=done / total)

    def _draw(self) -> None:
        with self._lock:
            info = pictures.get_kernel_lab_info(self.result)
            sentence = pictures.caption(info)
            self.conclusion.say(sentence)
            self.chart.show(pictures.draw_kernel_lab(info, self.screen.theme, self.screen.narrow), sentence)
            self.heat.show(
                pictures.draw_hit_map(info, self.screen.theme, self.screen.narrow),
                "L2 hit rate by block size and prefix",
            )
            self.table.show(pictures.table(info) if self.result else make_table([], []))
            for line, verdict in zip(self.claims, self.verdicts, strict=False):
                line.say(f"{verdict.evidence} [{verdict.method.split(' ')[0]}, {verdict.card}]",
                         heading=f"{verdict.claim_id} {verdict.finding}: {verdict.claim}")  # fmt: skip
