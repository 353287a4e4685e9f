"""Sources of labelled images: a folder with one folder per class, or a Hub dataset.

The first run decodes each image of a source once, so that a damaged image is found before the training, and writes
the digests of the images to the cache folder:

    <digest>.images   one line per image; the name is a fingerprint of the source's files
    <digest>.lock     held by the process that reads the images, while others wait
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

from crosshead.common.atomic_write import write_atomically
from crosshead.common.errors import EvalError, RecipeError, one_line
from crosshead.common.hub_rows import reading_hub
from crosshead.common.images import IMAGE_SUFFIXES, is_image, upright
from crosshead.common.progress import Counter, Progress

from ..schema.sections import DataSource
from .readers import file_states, files_in, missing_column
from .token_cache import locked

BLOCK = 1024
"""Number of images per block when a source is checked."""
FORMAT = 2
"""Version of the digest cache; increment it when the digests of unchanged images change."""


class ClassFolders:
    """Image files in one folder per class, at any depth; the name of the folder is the class name."""

    def __init__(self, source: DataSource) -> None:
        root = Path(source.path)
        try:
            folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError as error:
            raise RecipeError(
                f"the images {source.path} cannot be read: {error.strerror}: give a folder with a folder of images "
                "for each class"
            ) from None
        self.classes = tuple(folder.name for folder in folders)
        """Class names, in the order of the class indices."""
        self.labels: list[int] = []
        """Class index of each image."""
        self._files: list[Path] = []
        for label, folder in enumerate(folders):
            files = [path for path in files_in(folder, "") if is_image(path, folder)]
            if not files:
                raise RecipeError(
                    f"the class folder {folder} has no images: add some ({', '.join(IMAGE_SUFFIXES)}), or remove it"
                )
            self._files += files
            self.labels += [label] * len(files)
        if len(folders) < 2:
            raise RecipeError(
                f"the images {source.path} have {len(folders)} class folders: give a folder with a folder of images "
                "for each of two or more classes"
            )

    def content(self, index: int) -> bytes:
        """Return the content of the image file."""
        return self._files[index].read_bytes()

    def place(self, index: int) -> str:
        """Return the path of the file, for error messages."""
        return str(self._files[index])

    def state(self) -> list[Any]:
        """Return path, size and modification time of each file: everything that determines the images."""
        return file_states(self._files)


class DatasetImages:
    """Images of a Hub dataset, or of a local copy of one."""

    def __init__(self, source: DataSource, image: str, label: str) -> None:
        try:
            import datasets
        except ImportError:
            raise RecipeError('Hub datasets need the datasets package: pip install "crosshead[train]"') from None
        self._source, self._image = source, image
        with reading_hub(source.path, source.split, RecipeError):
            rows: Any = datasets.load_dataset(source.path, source.subset, split=source.split, revision=source.revision)
            for column in (image, label):
                if column not in rows.column_names:
                    raise missing_column(f"the Hub dataset {source.path}", column, rows.column_names)
            values, kind = [None if value != value else value for value in rows[label]], rows.features[label]  # NaN
            self._rows = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
            self._files = [Path(file["filename"]) for file in rows.cache_files]
        if any(isinstance(value, list | dict) for value in values):
            raise RecipeError(
                f"the Hub dataset {source.path} has lists in {label!r}: choose a column with one class each"
            )
        if isinstance(kind, datasets.ClassLabel):
            self.classes, self.labels = tuple(kind.names), [-1 if value is None else value for value in values]
        else:
            names = sorted({value for value in values if value is not None})
            numbers = {name: number for number, name in enumerate(names)}
            self.classes, self.labels = tuple(map(str, names)), [numbers.get(value, -1) for value in values]
        for index, value in enumerate(self.labels):
            if not 0 <= value < len(self.classes):
                raise RecipeError(f"{self.place(index)} has no class in {label!r}: choose another split or column")
        if len(self.classes) < 2:
            raise RecipeError(
                f"the Hub dataset {source.path} has {len(self.classes)} class in {label!r}: two or more are needed"
            )

    def content(self, index: int) -> bytes:
        """Return the encoded image."""
        value = self._rows[index][self._image]
        if value is None:
            raise ValueError("there is no image")
        return Path(value["path"]).read_bytes() if value["bytes"] is None else value["bytes"]

    def place(self, index: int) -> str:
        """Return the row number, counted from 1, and the dataset's name."""
        return f"row {index + 1} of the Hub dataset {self._source.path}"

    def state(self) -> list[Any]:
        """Return the column, the split, the number of rows, and the files of the prepared dataset."""
        return [self._image, self._source.split, len(self.labels), *file_states(self._files)]


ImageSource = ClassFolders | DatasetImages
"""A source of encoded images, each with a class."""


def require_pillow() -> Any:
    """Import and return the package PIL; raise `RecipeError` if Pillow is not installed."""
    try:
        import PIL.Image
    except ImportError:
        raise RecipeError("images need Pillow, which is not installed: pip install pillow") from None
    return PIL


def decoded(source: ImageSource, index: int, channels: int, content: bytes | None = None) -> Any:
    """Decode an image into a Pillow image with 1 or 3 channels, rotated upright; raise `RecipeError` on failure."""
    pillow = require_pillow()
    try:
        with pillow.Image.open(BytesIO(source.content(index) if content is None else content)) as image:
            return upright(image, channels)
    except Exception as error:  # Pillow raises many exception types
        is_unknown = isinstance(error, pillow.UnidentifiedImageError)  # its message shows an object in memory
        reason = "Pillow does not know its format" if is_unknown else one_line(error)
        raise RecipeError(
            f"{source.place(index)} cannot be read as an image: {reason}: remove or replace it"
        ) from error


def digests(source: ImageSource, name: str, root: Path, progress: Progress) -> list[str]:
    """Return the digest of each image, from the cache folder if there; otherwise decode all images and write it."""
    try:
        key = json.dumps([FORMAT, source.state()])
        path = root / f"{blake2b(key.encode(), digest_size=16).hexdigest()}.images"
        root.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            result = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            if len(result) != len(source.labels):
                result = list(_checked(source, Counter(progress, name, len(source.labels))))
                write_atomically({path: "".join(f"{digest}\n" for digest in result)})
        return result
    except (OSError, EvalError) as error:  # `write_atomically` raises `EvalError`
        reason = getattr(error, "strerror", None) or one_line(error)
        raise RecipeError(f"{name} cannot be read, or the cache {root} not written: {reason}") from error


def _checked(source: ImageSource, counter: Counter) -> Iterator[str]:
    """Decode each image and yield its digest; threads run in parallel, as Pillow releases the GIL."""
    count = len(source.labels)
    with ThreadPoolExecutor() as pool:
        for begin in range(0, count, BLOCK):
            block = range(begin, min(count, begin + BLOCK))
            yield from pool.map(partial(_digest, source), block)
            counter.add(len(block))


def _digest(source: ImageSource, index: int) -> str:
    try:
        content = source.content(index)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{source.place(index)} cannot be read: {one_line(error)}") from None
    decoded(source, index, 3, content)
    return blake2b(content, digest_size=16).hexdigest()
