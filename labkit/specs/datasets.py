"""Where the traffic traces lie, in a source checkout or an installed package, and what is known of each."""

from __future__ import annotations

import site
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import FileFormatError

_MARKER = "README.md"


@dataclass(frozen=True)
class Dataset:
    """One trace that comes with labkit.

    Attributes:
        name: as users name it.
        file: under `datasets/`.
        source, licence: where the numbers come from.
        title: what the traffic is, in a few words.
        note: what to know before using it; empty for nothing.
        step: what was done to the source before it came here; empty for a mere change of form.
    """

    name: str
    file: str
    source: str
    licence: str
    title: str
    note: str = ""
    step: str = ""


_AZURE = "Azure/AzurePublicDataset@b469a113cedc, Patel et al., Splitwise, ISCA 2024"
_MOONCAKE = "kvcache-ai/Mooncake@3b5a59413395, Mooncake, FAST 2025"
_DATASETS = (
    Dataset("azure-2023-conv", "azure-2023-conv.csv.gz", _AZURE, "CC-BY-4.0", "Chat"),
    Dataset("azure-2023-code", "azure-2023-code.csv.gz", _AZURE, "CC-BY-4.0", "Code completion: long in, short out"),
    Dataset(
        "mooncake-conversation", "mooncake-conversation.csv.gz", _MOONCAKE, "Apache-2.0",
        "Long-context chat with shared prefixes",
        "arrivals come in batches of 3 s; 37 % of input tokens could be reused",
    ),
    Dataset(
        "mooncake-synthetic", "mooncake-synthetic.csv.gz", _MOONCAKE, "Apache-2.0",
        "Retrieval and agents with shared prefixes", "65 % of input tokens could be reused",
    ),
    Dataset(
        "servegen-deepseek-r1", "servegen-deepseek-r1-sampled.csv.gz",
        "sampled from alibaba/ServeGen@f891d1189eb3, arXiv 2505.09999", "Apache-2.0", "Reasoning: long out",
        step="sampled with seed 20261130 from the published rates and length histograms",
    ),
    Dataset(
        "arxiv-summarization", "arxiv-summarization-lengths.csv.gz", "microsoft/vidur@7d47513363ec", "MIT",
        "Summarisation of papers", "lengths only: every request arrives at 0 s unless arrivals are given",
    ),
)  # fmt: skip


def dataset_names() -> tuple[str, ...]:
    """Names that `load_workload` knows."""
    return tuple(entry.name for entry in _DATASETS)


def find_dataset(name: str) -> Dataset | None:
    """The dataset called `name` (or by its file), or None."""
    wanted = name.casefold()
    return next((entry for entry in _DATASETS if wanted in (entry.name, entry.file)), None)


def datasets_folder() -> Path:
    """The folder that holds the traces.

    Raises:
        FileFormatError: neither a source checkout's `datasets/` nor an installed `share/labkit/datasets` is there.
    """
    package = Path(__file__).resolve().parent.parent
    shared = Path("share") / "labkit" / "datasets"
    candidates = [
        package.parent / "datasets",
        package.parent / shared,
        Path(sysconfig.get_path("data")) / shared,
        Path(site.getuserbase()) / shared,
    ]
    for folder in candidates:
        if (folder / _MARKER).is_file():
            return folder
    raise FileFormatError(
        "the traces that come with labkit are not there",
        available="looked in " + ", ".join(str(folder) for folder in candidates),
        works="installing labkit again, or the path of a trace of your own",
    )


def dataset_path(entry: Dataset) -> Path:
    """The file of `entry`."""
    return datasets_folder() / entry.file
