"""Pixels of encoded images, in every format that Pillow decodes by itself.

All images of a data set get one shape and type: uint8, or float32 if there are images of more than 8 bits.
"""

import io
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import PIL
from PIL import ExifTags, Image, ImageCms, ImageFile, ImageOps, UnidentifiedImageError

from cfl_ray.config.data import ImagesDataConfig
from cfl_ray.data.data_set import DataSet, Progress
from cfl_ray.data.reading import reason as reason_of
from cfl_ray.errors import DataError
from cfl_ray.system.machine import usable_cpus
from cfl_ray.system.mapped import mapped_array

Encoded = bytes | None  # content of an image file; None: missing
# Version of the decoding of the images for which `Decoder.is_changed` is true. To be raised if their pixels change, so
# that their shards are not reused. Version 1 (0.1.0) dropped transparency, clipped 16 bits and ignored `mode`.
DECODING = 2

_BATCH = 16  # images that a thread decodes in turn
_LARGE = 4096  # bytes of an encoded image from which on several threads decode faster than one
_GREY = ("1", "L", "LA", "La")
_NUMBERS = {8: "8 bits, divided by 255", 16: "16 bits, divided by 65535", 32: "numbers as they are"}  # by their bits
# Ghostscript, another program, draws the first; of the second, Pillow reads the size only
_NOT_DECODED = ("EPS", "MPEG")


@cache
def formats() -> tuple[str, ...]:
    """Names of the formats that this Pillow decodes without another program."""
    known = Image.registered_extensions().values()  # imports all plugins of Pillow
    names = {name for name in known if name in Image.OPEN and name not in _NOT_DECODED}
    return tuple(sorted(name for name in names if not _is_stub(name)))


def _is_stub(name: str) -> bool:
    """Whether Pillow identifies files of this format, but leaves their decoding to other packages."""
    opener = Image.OPEN[name][0]
    return isinstance(opener, type) and issubclass(opener, ImageFile.StubImageFile)


@cache
def suffixes() -> frozenset[str]:
    """Suffixes, in lower case, of the files that this Pillow decodes."""
    decoded = {*formats(), "MPO"}  # opened as JPEG
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in decoded)


class Pixels(NamedTuple):
    """The values of a decoded image."""

    values: np.ndarray  # (C, H, W), C is 1 or 3: uint8, or float32 for more bits
    alpha: np.ndarray | None  # uint8 (H, W); None if it is not kept
    bits: int  # 8: 0..255; 16: float32 0..1; 32: float32, numbers as they are


class _Decoded(NamedTuple):
    """A decoded image, and what is counted of it."""

    pixels: Pixels
    size: tuple[int, int]  # height and width in the file
    kind: tuple[str, str]  # kind and mode
    remarks: list[str]  # what is not used of it


class Layout(NamedTuple):
    """Channels and type of arrays of images."""

    colours: bool = False  # three channels instead of a grey one
    alpha: bool = False  # another channel, the last
    bits: int = 8  # as in `Pixels`

    @property
    def channels(self) -> int:
        """C."""
        return (3 if self.colours else 1) + self.alpha

    @property
    def dtype(self) -> type[np.generic]:
        """Type of the arrays."""
        return np.uint8 if self.bits == 8 else np.float32

    @property
    def most(self) -> int:
        """The value of alpha that means opaque."""
        return 255 if self.bits == 8 else 1

    @property
    def in_words(self) -> str:
        """Channels and numbers."""
        colours = "red, green and blue" if self.colours else "grey"
        return f"{colours}{' with alpha' * self.alpha} ({_NUMBERS[self.bits]})"


@dataclass(frozen=True)
class Drawing:
    """How images become arrays.

    transparency: white: images are drawn on white; keep: it becomes the last channel; drop: it is ignored. size: height
    and width to which every image is resized; None: its own, which must be that of the first. fit: stretch: as a whole,
    as torchvision's Resize with two numbers; crop: the largest part around the centre that has the ratio of `size`.
    """

    transparency: str = "white"
    size: tuple[int, int] | None = None
    fit: str = "stretch"

    def resized(self, image: Image.Image) -> Image.Image:
        """The image in this size, by bilinear interpolation over all pixels that a new one covers.

        image: of mode L, RGB, RGBA or F. Colours count by their alpha.
        """
        if self.size is None:
            return image
        width_height = self.size[::-1]
        if self.fit == "crop":
            return ImageOps.fit(image, width_height, Image.Resampling.BILINEAR)
        return image.resize(width_height, Image.Resampling.BILINEAR)


AS_STORED = Drawing()


def drawing_of(data: ImagesDataConfig) -> Drawing:
    """The drawing that the section `data` asks for."""
    size = data.image_size
    return Drawing(data.transparency, None if size is None else (size[0], size[1]), data.image_fit)


class Decoder:
    """Decodes images to arrays (C, H, W) of one shape and type, and counts what it saw.

    All have one height and width. They have colours if the first has or any has, likewise transparency if
    it is kept, and 16 bits: a grey image then gets three equal channels, an opaque one is opaque everywhere, and values
    of 8 bits are numbers between 0 and 1, too. Test images have what the training images have.

    mode: of Pillow, to which every image is converted; None: its own.
    """

    def __init__(self, drawing: Drawing = AS_STORED, mode: str | None = None) -> None:
        self.drawing, self.mode = drawing, mode
        self.size: tuple[int, int] | None = None  # height and width; None before the first image
        self.layout = Layout()
        self.is_final = False  # whether the training images are decoded
        self.is_changed = False  # whether an image had other pixels in version 1 of the decoding
        self.seen: Counter[tuple[str, str]] = Counter()  # images by kind and mode
        self.sizes: Counter[tuple[int, int]] = Counter()  # images by their height and width in the file
        self.remarks: Counter[str] = Counter()  # images by what is not used of them

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W); raises DataError before the first image."""
        assert self.size is not None
        return (self.layout.channels, *self.size)

    @property
    def version(self) -> int | None:
        """The version of the decoding on which the decoded images depend; None if they have the same pixels in all."""
        return DECODING if self.is_changed else None

    def first(self, content: Encoded, name: str) -> "Decoder":
        """This decoder, with the size and layout of an image unless it has one already. name: for messages."""
        if self.size is None:
            with closing(_opened(content, name)) as image:
                pixels = self._pixels(image, name)
            channels, height, width = pixels.values.shape
            self.size, self.layout = (height, width), Layout(channels == 3, pixels.alpha is not None, pixels.bits)
        return self

    def all(
        self,
        images: Iterable[tuple[Encoded, str, str]],
        count: int,
        pixels: bool = True,
        progress: Progress | None = None,
    ) -> np.ndarray:
        """The images as an array (count, C, H, W); if `pixels` is false, a broadcast 0.

        images: (content, name for messages, kind for the report; empty: the format). Raises DataError for an image of
        another size, and after the training images for one that has what none of them has.
        """
        if not pixels:
            return np.broadcast_to(self.layout.dtype(0), (count, *self.shape))
        x = mapped_array((count, *self.shape), self.layout.dtype)
        for done, (name, one) in enumerate(self._decoded_in_order(images), 1):
            before = self.layout
            self._take(name, one)
            if self.layout != before:
                x = self._in_new_layout(x, before, done - 1)
            x[done - 1] = self._fitted(one.pixels)
            if progress and (done % 1000 == 0 or done == count):
                progress("decoding images", done, count)
        self.is_final = True
        return x

    def look(self, content: Encoded, name: str, kind: str = "") -> None:
        """Decodes an image, and widens the layout to what it has. Arguments and errors: as for `all`."""
        self._take(name, self._decoded(content, name, kind))

    def _decoded_in_order(self, images: Iterable[tuple[Encoded, str, str]]) -> Iterator[tuple[str, _Decoded]]:
        """Yields the name and the values of each image. At most two batches a thread are in memory."""
        batches = _batched(iter(images))
        first = next(batches, [])
        is_large = sum(len(content or b"") for content, _, _ in first) > _LARGE * len(first)
        threads = usable_cpus() if is_large else 1  # Pillow decodes without Python's lock, and numpy's work is small
        waiting = deque[Future[list[tuple[str, _Decoded]]]]()
        with ThreadPoolExecutor(threads, "decode") as pool:
            for batch in chain([first], batches):
                waiting.append(pool.submit(lambda batch: [(one[1], self._decoded(*one)) for one in batch], batch))
                if len(waiting) == 2 * threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()

    def _decoded(self, content: Encoded, name: str, kind: str) -> _Decoded:
        """The image, of which nothing is counted yet, so that several threads can decode."""
        with closing(_opened(content, name)) as image:
            size = image.height, image.width
            if self.drawing.size is None and size != self.size:  # before decoding, so that no huge image is decoded
                assert self.size is not None
                raise DataError(
                    f"{name} is {_in_words(size)}, the first image is {_in_words(self.size)}; set data.image_size: "
                    "[HEIGHT, WIDTH], to which all are resized"
                )
            mode, remarks = image.mode, [*self._remarks(image)]  # before decoding
            pixels = self._pixels(image, name)
            if _is_turned(image):
                remarks.append("have an orientation in EXIF, which is not applied, as in torchvision's ImageFolder")
            return _Decoded(pixels, size, (kind or str(image.format), mode), remarks)

    def _take(self, name: str, one: _Decoded) -> None:
        """Counts a decoded image, and widens the layout to what it has."""
        self.sizes[one.size] += 1
        self.seen[one.kind] += 1
        self.remarks.update(one.remarks)
        self._widen(one.pixels, name)

    def _widen(self, pixels: Pixels, name: str) -> None:
        """Adds to the layout what an image has and no image before had."""
        x, alpha, bits = pixels
        before = self.layout
        if 32 in (bits, before.bits) and bits != before.bits:
            raise DataError(
                f"{name} has {_NUMBERS[bits]}, others have {_NUMBERS[before.bits]}; convert all to one mode"
            )
        self.layout = Layout(
            colours=before.colours or (len(x) == 3 and bool((x != x[:1]).any())),
            alpha=before.alpha or (alpha is not None and bool((alpha < 255).any())),
            bits=max(bits, before.bits),
        )
        if self.is_final and self.layout != before:
            raise DataError(
                f"{name} is {self.layout.in_words}, the training images are {before.in_words}; convert all to one mode"
            )

    def _in_new_layout(self, x: np.ndarray, before: Layout, count: int) -> np.ndarray:
        """A copy of an array whose first `count` images were decoded in the layout `before`."""
        new, old = mapped_array((len(x), *self.shape), self.layout.dtype), x[:count]
        if self.layout.dtype != before.dtype:
            old = old / np.float32(255)
        colours = 3 if self.layout.colours else 1
        new[:count, :colours] = old[:, : 3 if before.colours else 1]
        if self.layout.alpha:
            new[:count, -1:] = old[:, -1:] if before.alpha else self.layout.most
        return new

    def _fitted(self, pixels: Pixels) -> np.ndarray:
        """The values of an image in the layout of all."""
        x, alpha, bits = pixels
        if bits < self.layout.bits:
            x = x / np.float32(255)  # equal to that of 16 bits, 257 x / 65535
        x = np.broadcast_to(x, (3, *x.shape[1:])) if self.layout.colours else x[:1]
        if not self.layout.alpha:
            return x
        kept = np.full(x.shape[1:], 255, np.uint8) if alpha is None else alpha
        return np.concatenate([x, (kept if self.layout.bits == 8 else kept / np.float32(255))[None]])

    def _remarks(self, image: Image.Image) -> Iterator[str]:
        """Yields remarks on what will not be used of an image that is not decoded yet."""
        if _frames(image) > 1:
            yield "have several frames, of which the first is read"
        if image.has_transparency_data and self.drawing.transparency == "white":
            how = "data.transparency: keep makes it a channel, drop ignores it"
            yield f"have transparency and are drawn on white; {how}"
        if image.has_transparency_data and self.drawing.transparency == "drop":
            yield "have transparency, which is ignored (data.transparency: drop)"
        if _loses_bits(image):
            yield "have colours of 16 bits, of which Pillow reads the upper 8"

    def _pixels(self, image: Image.Image, name: str) -> Pixels:
        """The values of an image, decoded here. Raises DataError if it is damaged."""
        try:
            if self.mode is not None and image.mode != self.mode:
                image, self.is_changed = image.convert(self.mode), True
            transparent = image.has_transparency_data
            is_16 = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
            if is_16 or image.mode in ("I", "F"):
                values, self.is_changed = np.asarray(image), True
                x = values.astype(np.float32) / np.float32(65535 if is_16 else 1)
                is_clear = values == image.info.get("transparency", -1) if transparent else np.zeros(values.shape, bool)
                if self.drawing.transparency == "white":
                    x[is_clear] = 1
                alpha = np.where(is_clear, 0, 255).astype(np.uint8) if transparent else None
                x = np.asarray(self.drawing.resized(Image.fromarray(x)))
                if alpha is not None:
                    alpha = np.asarray(self.drawing.resized(Image.fromarray(alpha)))
                pixels = Pixels(x[None], alpha if self.drawing.transparency == "keep" else None, 16 if is_16 else 32)
            else:
                pixels = self._of_8_bits(image)
        except Exception as error:  # plugins of Pillow raise errors of many classes
            raise _unreadable(name, error) from error
        if pixels.bits == 32 and not np.isfinite(pixels.values).all():
            raise DataError(f"{name} has NaN or infinity among its numbers; correct it or leave it out")
        return pixels

    def _of_8_bits(self, image: Image.Image) -> Pixels:
        is_grey, alpha = image.mode in _GREY, None
        if not image.has_transparency_data or self.drawing.transparency == "drop":
            drawn = self.drawing.resized(_converted(image, "L" if is_grey else "RGB"))
        else:
            drawn = self.drawing.resized(_converted(image, "RGBA"))
            kept = np.asarray(drawn.getchannel("A"))
            if (kept < 255).any():
                self.is_changed = True
            if self.drawing.transparency == "keep":
                alpha = kept
            else:
                drawn = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn)
        x = np.asarray(drawn)
        x = x[None] if x.ndim == 2 else x.transpose(2, 0, 1)
        return Pixels(x[:1] if is_grey else x[:3], alpha, 8)

    def with_report(self, data_set: DataSet, what: str) -> DataSet:
        """The data set of the decoded images, with what `report` says and the version of their decoding."""
        notes, warnings = self.report(what)
        return replace(data_set, notes=tuple(notes), warnings=(*data_set.warnings, *warnings), decoding=self.version)

    def _sizes_in_words(self) -> str:
        """Sizes in the files, and the one to which images were resized."""
        assert self.size is not None
        kept, others = self.sizes[self.size], sorted(self.sizes.keys() - {self.size})
        if not others:
            return f"all of them {_in_words(self.size)}, as data.image_size"
        ends = [_in_words(others[0]), _in_words(others[-1])]
        of = ends[0] if len(others) == 1 else f"{len(others)} sizes, {' to '.join(ends)},"
        how = {"stretch": "as a whole", "crop": "from their centre"}[self.drawing.fit]
        return f"{self.sizes.total() - kept} of {of} resized to {_in_words(self.size)} {how}"

    def report(self, what: str) -> tuple[list[str], list[str]]:
        """(notes, warnings) on the images that were decoded. what: name of the data."""
        if not self.seen:
            return [], []
        kinds = ", ".join(f"{count} {kind} ({mode})" for (kind, mode), count in sorted(self.seen.items()))
        note = f"{what}: read {self.seen.total()} images, {self.layout.in_words}: {kinds}"
        if self.drawing.size is not None:
            note += f"; {self._sizes_in_words()}"
        is_mixed = len({mode for _, mode in self.seen}) > 1
        remarks = [f"{what}: {count} images {text}" for text, count in sorted(self.remarks.items())]
        return ([] if is_mixed else [note]), [note] * is_mixed + remarks


def _batched(images: Iterator[tuple[Encoded, str, str]]) -> Iterator[list[tuple[Encoded, str, str]]]:
    while batch := list(islice(images, _BATCH)):
        yield batch


def _in_words(size: tuple[int, int]) -> str:
    return "x".join(map(str, size))


def _opened(content: Encoded, name: str) -> Image.Image:
    """The image, of which only the header is read."""
    if content is None:
        raise DataError(f"{name} has no image bytes; files that hold only paths are not supported, embed the images")
    try:
        return Image.open(io.BytesIO(content), formats=formats())
    except Exception as error:  # plugins of Pillow raise errors of many classes
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> DataError:
    reason = "its content is of no known format" if isinstance(error, UnidentifiedImageError) else reason_of(error)
    return DataError(f"{name} is no image that Pillow {PIL.__version__} can read, or damaged: {reason}")


def _converted(image: Image.Image, mode: str) -> Image.Image:
    """The image in mode L, RGB or RGBA."""
    if image.mode == "LAB":  # Pillow converts it by profiles only
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB") or image
    straight = {"La": "LA", "RGBa": "RGBA"}.get(image.mode)  # multiplied by alpha
    return (image.convert(straight) if straight else image).convert(mode)


def _frames(image: Image.Image) -> int:
    with suppress(Exception):  # damaged after the first
        return int(getattr(image, "n_frames", 1))
    return 1


def _is_turned(image: Image.Image) -> bool:
    """Whether EXIF asks to turn an image that is decoded. Pillow turns TIFF files itself, and then removes the tag."""
    with suppress(Exception):  # damaged EXIF
        return image.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1)
    return False


def _loses_bits(image: Image.Image) -> bool:
    """Whether Pillow decodes colours of 16 bits as 8 bits. Called before decoding."""
    if image.mode.startswith(("I", "F")):
        return False
    codecs = [(tile[0], tile[3]) for tile in getattr(image, "tile", [])]
    of_tiles = [(name, args if isinstance(args, tuple) else (args,)) for name, args in codecs]
    return any(
        (isinstance(arg, str) and ";16" in arg) or (name == "ppm" and isinstance(arg, int) and arg > 255)
        for name, args in of_tiles
        for arg in args
    )
