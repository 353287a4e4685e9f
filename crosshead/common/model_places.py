"""Where a model is: a folder, or a Hub id, with an optional revision behind it."""

import os


def split_revision(name: str) -> tuple[str, str | None]:
    """A Hub id such as `organisation/model@revision` in its two parts; any other name has no revision."""
    place, mark, revision = name.rpartition("@")
    if not (mark and place and revision) or os.path.exists(name):
        return name, None
    return place, revision


def placed(name: str) -> dict[str, str]:
    """The arguments of `from_pretrained` for a name: a model's, or a model's with a revision."""
    place, revision = split_revision(name)
    return {"pretrained_model_name_or_path": place} | ({} if revision is None else {"revision": revision})
