"""Pixels of every mode and depth that Pillow has, against formulas."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms
from torchvision import transforms

from cfl_ray.data.decoding import Decoder, Drawing, formats, suffixes
from cfl_ray.errors import DataError

DRAW = np.random.default_rng(0)
GREY, COLOURS = DRAW.integers(0, 256, (4, 5), np.uint8), DRAW.integers(0, 256, (4, 5, 3), np.uint8)
DEEP = DRAW.integers(0, 65536, (4, 5)).astype(np.uint16)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def png(x, colour_type):
    """A PNG of 16 bits per channel, which Pillow cannot write in colours. x: uint16 (H, W, C)."""

    def chunk(name, content):
        crc = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", crc)

    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in x)
    header = struct.pack(">IIBBBBB", x.shape[1], x.shape[0], 16, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def decode(*contents, transparency="white", size=None, fit="stretch"):
    """The images, and the decoder."""
    decoder = Decoder(Drawing(transparency, size, fit)).first(contents[0], "first")
    images = ((content, f"image {number}", "") for number, content in enumerate(contents))
    return decoder.all(images, len(contents)), decoder


def as_16_bits(x):
    return x.astype(np.float32) / np.float32(65535)


def test_formats_are_those_of_this_pillow():
    assert {".png", ".jpg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".gif", ".jp2", ".mpo"} <= suffixes()
    assert not {".eps", ".ps", ".h5", ".mpg", ".pdf", ".txt", ".csv", ".svg", ".wmf"} & suffixes()
    assert (".avif" in suffixes()) == ("AVIF" in formats())


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "TGA", "PCX", "SGI", "JPEG2000", "DIB"])
def test_lossless_formats_keep_bytes(kind):
    x, decoder = decode(encoded(GREY, kind))
    assert x.dtype == np.uint8 and np.array_equal(x, GREY[None, None])
    x, _ = decode(encoded(COLOURS, kind))
    assert np.array_equal(x, COLOURS.transpose(2, 0, 1)[None])
    assert decoder.seen == {(kind if kind != "DIB" else "DIB", "L"): 1} and not decoder.remarks


def test_webp_of_a_grey_image_has_colours():
    x, decoder = decode(encoded(GREY, "WEBP", lossless=True))
    assert np.array_equal(x[0], np.stack([GREY] * 3)) and decoder.seen == {("WEBP", "RGB"): 1}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_grey_of_16_bits_is_divided_by_65535(kind):
    """PPM files come in mode I, the others in I;16."""
    x, decoder = decode(encoded(DEEP, kind))
    assert x.dtype == np.float32 and np.array_equal(x, as_16_bits(DEEP)[None, None]) and decoder.layout.bits == 16


def test_big_endian_of_16_bits():
    image = Image.frombytes("I;16B", (5, 4), DEEP.astype(">u2").tobytes())
    assert np.array_equal(decode(encoded(image, "TIFF"))[0], as_16_bits(DEEP)[None, None])


@pytest.mark.parametrize("numbers", [DEEP.astype(np.int32) * 100 - 7, DEEP.astype(np.float32) / 3 - 100])
def test_numbers_of_32_bits_stay_as_they_are(numbers):
    x, _ = decode(encoded(numbers, "TIFF"))
    assert x.dtype == np.float32 and np.array_equal(x[0, 0], numbers.astype(np.float32))


def test_nan_is_an_error():
    with pytest.raises(DataError, match="first has NaN or infinity"):
        decode(encoded(np.full((2, 2), np.nan, np.float32), "TIFF"))


@pytest.mark.parametrize("order", [1, -1])
def test_8_and_16_bits_have_one_range(order):
    """255 of 8 bits and 65535 of 16 bits are 1, whichever comes first."""
    contents = [encoded(np.full((4, 5), 255, np.uint8)), encoded(DEEP), encoded(GREY)][::order]
    x, decoder = decode(*contents)
    white, deep, grey = x[::order]
    assert (white == 1).all() and np.array_equal(deep[0], as_16_bits(DEEP))
    assert np.array_equal(grey[0], GREY / np.float32(255))
    assert "16 bits, divided by 65535" in decoder.report("d")[1][0]


def test_numbers_of_32_bits_are_not_mixed():
    with pytest.raises(DataError, match="image 1 has 8 bits, divided by 255, others have numbers as they are"):
        decode(encoded(DEEP.astype(np.float32), "TIFF"), encoded(GREY))


@pytest.mark.parametrize("colour_type, channels", [(2, 3), (6, 4)])
def test_colours_of_16_bits_are_named(colour_type, channels):
    """Pillow reads the upper byte of each channel."""
    x = DRAW.integers(0, 65536, (4, 5, channels)).astype(np.uint16)
    read, decoder = decode(png(x, colour_type), transparency="drop")
    assert np.array_equal(read[0], (x[..., :3] >> 8).astype(np.uint8).transpose(2, 0, 1))
    assert decoder.remarks["have colours of 16 bits, of which Pillow reads the upper 8"] == 1


def over_white(x, alpha):
    """x a + 255 (1 - a), a = alpha / 255, within the rounding of Pillow's integers."""
    a = alpha.astype(float) / 255
    return x * a[..., None] + 255 * (1 - a[..., None])


class TestAlpha:
    ALPHA = DRAW.integers(0, 256, (4, 5), np.uint8)
    RGBA = np.dstack([COLOURS, ALPHA])
    LA = np.dstack([GREY, ALPHA])

    def test_on_white(self):
        x, decoder = decode(encoded(self.RGBA))
        assert x.shape[1] == 3
        assert np.abs(x[0].transpose(1, 2, 0) - over_white(COLOURS, self.ALPHA)).max() <= 1
        assert "1 images have transparency and are drawn on white" in decoder.report("d")[1][0]
        x, _ = decode(encoded(self.LA))
        assert x.shape[1] == 1 and np.abs(x[0, 0] - over_white(GREY[..., None], self.ALPHA)[..., 0]).max() <= 1

    def test_opaque_images_keep_their_bits(self):
        opaque = np.full((4, 5), 255, np.uint8)
        assert np.array_equal(decode(encoded(np.dstack([COLOURS, opaque])))[0], decode(encoded(COLOURS))[0])
        assert np.array_equal(decode(encoded(np.dstack([GREY, opaque])))[0], decode(encoded(GREY))[0])

    def test_kept(self):
        assert np.array_equal(decode(encoded(self.RGBA), transparency="keep")[0][0], self.RGBA.transpose(2, 0, 1))
        assert np.array_equal(decode(encoded(self.LA), transparency="keep")[0][0], self.LA.transpose(2, 0, 1))

    def test_kept_among_opaque_images(self):
        """A grey image, one with transparency, one with colours: all have four channels."""
        x, _ = decode(encoded(GREY), encoded(self.LA), encoded(COLOURS), transparency="keep")
        assert x.shape == (3, 4, 4, 5)
        assert np.array_equal(x[0], [GREY, GREY, GREY, np.full_like(GREY, 255)])
        assert np.array_equal(x[1], [GREY, GREY, GREY, self.ALPHA])
        assert np.array_equal(x[2, :3], COLOURS.transpose(2, 0, 1)) and (x[2, 3] == 255).all()

    def test_kept_among_images_of_16_bits(self):
        x, _ = decode(encoded(self.LA), encoded(DEEP), transparency="keep")
        assert np.array_equal(x[1], [as_16_bits(DEEP), np.ones_like(x[1, 1])])
        assert np.array_equal(x[0], self.LA.transpose(2, 0, 1) / np.float32(255))

    def test_dropped(self):
        assert np.array_equal(decode(encoded(self.RGBA), transparency="drop")[0][0], COLOURS.transpose(2, 0, 1))

    @pytest.mark.parametrize("alpha, expected", [("white", [255, 3]), ("keep", [0, 255]), ("drop", [2, 3])])
    def test_a_transparent_colour(self, alpha, expected):
        """Of PNG files without an alpha channel: grey 2 is transparent; keep: the last channel."""
        content = encoded(np.array([[2, 3]], np.uint8), transparency=2)
        assert decode(content, transparency=alpha)[0][0, -1].tolist() == [expected]

    def test_a_transparent_grey_of_16_bits(self):
        x, _ = decode(encoded(np.array([[2, 3]], np.uint16), transparency=2))
        assert x[0, 0].tolist() == [[1, np.float32(3 / 65535)]]

    def test_palettes(self):
        image = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
        image.putpalette([9, 8, 7, 1, 2, 3])
        assert decode(encoded(image))[0][0, :, 0].T.tolist() == [[9, 8, 7], [1, 2, 3]]
        assert decode(encoded(image, transparency=0))[0][0, :, 0].T.tolist() == [[255] * 3, [1, 2, 3]]


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "1"])
def test_other_modes_are_converted(mode):
    image = Image.fromarray(COLOURS).convert(mode)
    expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    x = decode(encoded(image, "TIFF"))[0][0]
    assert np.array_equal(x, expected if mode != "1" else expected[:1])


def test_lab_is_converted_by_its_profile():
    smooth = np.full((4, 5, 3), (120, 90, 60), np.uint8)
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    image = ImageCms.profileToProfile(Image.fromarray(smooth), *profiles, outputMode="LAB")
    x = decode(encoded(image, "TIFF"))[0][0].transpose(1, 2, 0).astype(int)
    assert np.abs(x - smooth).max() <= 3  # LAB of 8 bits is coarser


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_frames_after_the_first_are_named(kind):
    frames = [Image.new("RGB", (5, 4), colour) for colour in ("red", "blue")]
    x, decoder = decode(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
    assert np.abs(x[0, :, 0, 0].astype(int) - [255, 0, 0]).max() <= 3
    assert decoder.remarks == {"have several frames, of which the first is read": 1}


def test_an_orientation_is_named_and_not_applied():
    """TIFF files are turned by Pillow itself."""
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    x, decoder = decode(encoded(COLOURS, exif=exif))
    assert x.shape == (1, 3, 4, 5) and list(decoder.remarks)[0].startswith("have an orientation in EXIF, which is not")
    x, decoder = decode(encoded(COLOURS, "TIFF", exif=exif))
    assert np.array_equal(x[0].transpose(1, 2, 0), np.rot90(COLOURS, -1)) and not decoder.remarks


@pytest.mark.parametrize("content", [b"", b"no image", encoded(COLOURS)[:50], b"%!PS-Adobe-3.0 EPSF-3.0\n", b"GIF89a"])
def test_what_is_no_image_is_named(content):
    with pytest.raises(DataError, match="first is no image that Pillow .* can read, or damaged: "):
        decode(content)


class TestResizing:
    WIDE, TALL = (DRAW.integers(0, 256, shape, np.uint8) for shape in ((30, 48, 3), (52, 20, 3)))

    def test_whole_images_as_torchvision_resizes_them(self):
        x, decoder = decode(encoded(self.WIDE), encoded(self.TALL), size=(12, 16))
        resize = transforms.Compose([transforms.Resize([12, 16]), transforms.PILToTensor()])
        for one, image in zip(x, (self.WIDE, self.TALL), strict=True):
            assert np.array_equal(one, resize(Image.fromarray(image)).numpy())
        note = "d: read 2 images, red, green and blue (8 bits, divided by 255): 2 PNG (RGB)"
        assert decoder.report("d")[0] == [f"{note}; 2 of 2 sizes, 30x48 to 52x20, resized to 12x16 as a whole"]

    def test_from_the_centre_as_torchvision_resizes_and_crops(self):
        """Where the other side is a whole number then, and so is the margin."""
        x, decoder = decode(encoded(self.WIDE), encoded(self.TALL), size=(10, 10), fit="crop")
        steps = [transforms.Resize(10), transforms.CenterCrop(10), transforms.PILToTensor()]
        for one, image in zip(x, (self.WIDE, self.TALL), strict=True):
            assert np.array_equal(one, transforms.Compose(steps)(Image.fromarray(image)).numpy())
        assert decoder.report("d")[0][0].endswith("resized to 10x10 from their centre")

    def test_images_of_this_size_keep_their_bytes(self):
        x, decoder = decode(encoded(GREY), encoded(DRAW.integers(0, 256, (9, 9), np.uint8)), size=(4, 5))
        assert np.array_equal(x[0, 0], GREY) and "1 of 9x9 resized to 4x5 as a whole" in decoder.report("d")[0][0]
        _, decoder = decode(encoded(GREY), size=(4, 5))
        assert decoder.report("d")[0][0].endswith("; all of them 4x5, as data.image_size")

    def test_halves_of_16_bits_are_the_mean_of_what_they_cover(self):
        """A triangle as wide as four pixels: weights 1, 3, 3, 1 inside, and what is left of them at the edges."""
        deep = np.tile(DEEP[:1], (2, 1))[:, :4]
        x, _ = decode(encoded(deep), size=(2, 2))
        left, right = np.array([3, 3, 1]) / 7, np.array([1, 3, 3]) / 7
        assert x.dtype == np.float32
        assert np.allclose(x[0, 0, 0], [left @ as_16_bits(deep[0, :3]), right @ as_16_bits(deep[0, 1:])], atol=1e-6)

    def test_hidden_colours_do_not_bleed(self):
        """Pixels without opacity have no part in a colour."""
        image = np.zeros((2, 2, 4), np.uint8)
        image[:, 0], image[:, 1] = [200, 100, 50, 255], [0, 255, 0, 0]
        x, _ = decode(encoded(image), size=(1, 1), transparency="keep")
        assert np.abs(x[0, :3, 0, 0].astype(int) - [200, 100, 50]).max() <= 1 and abs(int(x[0, 3, 0, 0]) - 128) <= 1
        x, _ = decode(encoded(image), size=(1, 1))
        assert np.abs(x[0, :, 0, 0].astype(int) - [228, 178, 153]).max() <= 2

    def test_palettes_are_resized_as_colours(self):
        image = Image.fromarray(self.WIDE).quantize(8)
        expected = decode(encoded(image.convert("RGB")), size=(6, 6))[0]
        assert np.array_equal(decode(encoded(image), size=(6, 6))[0], expected)


def test_images_keep_their_order_in_threads(monkeypatch):
    """Noise that is too large for one thread; and the first of two damaged images is named."""
    monkeypatch.setattr("cfl_ray.data.decoding.usable_cpus", lambda: 4)
    images = [DRAW.integers(0, 256, (40, 50, 3), np.uint8) for _ in range(150)]
    contents = [encoded(image) for image in images]
    x, decoder = decode(*contents)
    assert np.array_equal(x, np.stack(images).transpose(0, 3, 1, 2)) and decoder.seen == {("PNG", "RGB"): 150}
    contents[149] = contents[101] = contents[0][:3000]
    with pytest.raises(DataError, match="image 101 is no image"):
        decode(*contents)
