"""Pages of `crosshead inspect` for encoders, T5 and vision transformers, in a real browser."""

import pytest
import torch
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import toys
import transnext_toys
from browser import BROWSER, DRIVER, opened, running, until
from crosshead.evals.inspect.inputs import Inputs
from crosshead.evals.inspect.page import write_report
from crosshead.evals.inspect.report import inspect_report
from image_toys import write_image_model, write_images
from packed import unpack
from toy_checkpoints import character_tokenizer, write_model

MINUS = "\N{MINUS SIGN}"
TEXT, TARGET = "the cat sat on the mat, and the dog saw it.", "it goes & goes."
T5 = {"encoder": {"talking": {}}, "cross": {"mixture": {"active_heads": 3}}}
BERT = {"knocking": {}}
PAGES = ("t5", "bert", "albert", "vit", "pair", "stage")
PAIRS = {"pair": ("vit", "deit"), "stage": ("vit", "transnext")}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("inspect_page"),
    pytest.mark.skipif(
        not (BROWSER and DRIVER), reason="no browser: Debian's packages are called chromium and chromium-driver"
    ),
]


@pytest.fixture(scope="module")
def pages_and_reports(tmp_path_factory):
    """The folder of pages, and the report of each page by name."""
    folder = tmp_path_factory.mktemp("pages")
    write_model(toys.mixed_model("T5", T5, num_decoder_layers=3), folder / "t5")
    write_model(toys.mixed_model("Bert", BERT), folder / "bert")
    write_model(toys.mixed_model("Albert", {"talking": {}}, num_hidden_layers=3), folder / "albert")
    write_image_model(folder / "vit")
    write_image_model(folder / "deit", "DeiT", image_size=32)
    transnext_toys.model_of({}, image_size=96, depths=[1, 1, 2, 2]).save_pretrained(folder / "transnext")
    size = {"height": 96, "width": 96}
    ViTImageProcessorPil(size=size).save_pretrained(folder / "transnext")
    image = write_images(folder / "images", 1) / "0.png"
    texts = dict.fromkeys(("bert", "albert"), Inputs({"prose": TEXT}))
    inputs = (
        texts | {"t5": Inputs({"prose": TEXT}, [TARGET])} | dict.fromkeys(("vit", *PAIRS), Inputs(image={"a": image}))
    )
    reports = {}
    for name in PAGES:
        models = PAIRS.get(name, (name,))
        reports[name] = inspect_report([str(folder / each) for each in models], inputs[name], lambda *_: None)
        write_report(reports[name], folder / f"{name}.html")
    return folder, reports


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with running(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def choose(page, title, label):
    """Choose the option `label` of the control whose label begins with `title`."""
    for control in page.all("#controls label.control, #overview label.control"):
        if control.text.startswith(title):
            (option,) = (each for each in control.find_elements("tag name", "option") if each.text == label)
            option.click()
            return
    raise LookupError(title)


def token(page, side, index, column=1):
    return page.one(f"#inspector .column:nth-child({column}) [data-side={side}] [data-token='{index}']")


def assert_same_weights(shown, row):
    """Assert that `shown` lists the five largest weights of `row`, equal to the printed digits."""
    indices = sorted(range(len(row)), key=lambda index: -abs(row[index]))[:5]
    assert [index for index, _ in shown] == indices
    for (index, text), weight in zip(shown, [row[index] for index in indices], strict=True):
        number = float(text.removesuffix(" %").replace(MINUS, "-").replace("<", ""))
        assert number == pytest.approx(100 * weight, abs=0.06 if abs(weight) < 1 else 0.6), index


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", PAGES)
def test_page_fits_both_widths_and_colour_schemes(pages_and_reports, browser, name, width, scheme):
    with opened(browser, pages_and_reports[0] / f"{name}.html", width, scheme) as page:
        parts = ["encoder", "decoder", "cross-attention"] if name == "t5" else [None]
        for part in parts:
            if part:
                choose(page, "Attention", part)
                until(browser, lambda part=part: page.title("gallery").startswith(f"Heads of {part} layer"))
            sizes = browser.execute_script(
                "const root = document.documentElement; return [root.scrollWidth, root.clientWidth, innerWidth]"
            )
            assert sizes[0] <= sizes[1] <= sizes[2] == width
            shown = {section.get_attribute("id") for section in page.all("main > section") if section.is_displayed()}
            assert {"overview", "gallery", "inspector", "norms", "similarity", "about"} <= shown
            assert ("routing" in shown) == (part == "cross-attention")


@torch.no_grad()
def test_encoder_token_shows_query_and_key_weights(pages_and_reports, browser):
    ids = torch.tensor([character_tokenizer()(TEXT)["input_ids"]])
    weights = toys.mixed_model("Bert", BERT)(ids, output_attentions=True).attentions[1][0]
    with opened(browser, pages_and_reports[0] / "bert.html") as page:
        for head, index in ((0, 41), (2, 3)):
            page.one(f"#gallery [data-head='{head}']").click()
            token(page, "rows", index).click()
            for side in ("rows", "columns"):
                assert token(page, side, index).get_attribute("aria-selected") == "true"
            assert_same_weights(page.rows("keys"), weights[head, index].tolist())
            assert_same_weights(page.rows("querys"), weights[head, :, index].tolist())


@torch.no_grad()
def test_t5_part_selection_and_cross_attention_weights(pages_and_reports, browser):
    tokenizer = character_tokenizer()
    ids, target = (tokenizer(text)["input_ids"] for text in (TEXT, TARGET))
    model = toys.mixed_model("T5", T5, num_decoder_layers=3)
    called = model(torch.tensor([ids]), decoder_input_ids=torch.tensor([[0, *target]]), output_attentions=True)
    with opened(browser, pages_and_reports[0] / "t5.html") as page:
        facts = page.one("#facts").text
        assert "3 cross-attention layers" in facts and "encoder: talking" in facts
        choose(page, "Attention", "cross-attention")
        until(browser, lambda: page.title("gallery").startswith("Heads of cross-attention layer"))
        page.one("#layer").send_keys("\ue010")  # END
        until(browser, lambda: page.title("gallery") == "Heads of cross-attention layer 2")
        assert page.title("inspector").startswith("Cross-attention layer 2, head 0,")
        assert page.title("matrices") == "Learnt matrices of cross-attention layer 2"
        page.one("#gallery [data-head='1']").click()
        token(page, "rows", 4).click()
        token(page, "columns", 30).click()
        weights = called.cross_attentions[2][0, 1]
        assert_same_weights(page.rows("keys"), weights[4].tolist())
        assert_same_weights(page.rows("querys"), weights[:, 30].tolist())
        page.all("#inspector .weights.querys button")[0].click()
        assert token(page, "rows", int(weights[:, 30].argmax())).get_attribute("aria-selected") == "true"
        assert token(page, "columns", 30).get_attribute("aria-selected") == "true"

        choose(page, "Attention", "decoder")
        until(browser, lambda: page.title("gallery") == "Heads of decoder layer 2")
        token(page, "rows", 9).click()
        assert_same_weights(page.rows("keys"), called.decoder_attentions[2][0, 1, 9, :10].tolist())
        choose(page, "Attention", "encoder")
        until(browser, lambda: page.title("gallery") == "Heads of encoder layer 1")
        token(page, "columns", 9).click()
        assert_same_weights(page.rows("querys"), called.encoder_attentions[1][0, 1, :, 9].tolist())


def test_measure_options_depend_on_t5_part(pages_and_reports, browser):
    with opened(browser, pages_and_reports[0] / "t5.html") as page:
        choose(page, "Colour", "weight on the token after")
        choose(page, "Attention", "cross-attention")
        until(browser, lambda: page.title("gallery").startswith("Heads of cross-attention layer"))
        labels = {option.text for option in page.all("#overview select option")}
        assert {"weight on the first token", "entropy", "head load"} <= labels
        assert not {"weight on the token after", "weight on itself", "mean distance"} & labels


def test_shared_layer_matrices_are_shown_at_each_depth(pages_and_reports, browser):
    with opened(browser, pages_and_reports[0] / "albert.html") as page:
        cards = set()
        for layer in (2, 0):
            page.one("#layer").send_keys("\ue010" if layer else "\ue011")  # END, HOME
            until(browser, lambda layer=layer: page.title("matrices") == f"Learnt matrices of layer {layer}")
            until(browser, lambda: page.all("#matrices .card"))
            cards.add(tuple(card.text for card in page.all("#matrices .card")))
        assert len(cards) == 1


def test_patches_overlay_the_image(pages_and_reports, browser):
    """The class token is selected at first; each patch lies at its position in the image, shaded by its weight."""
    folder, reports = pages_and_reports
    record = reports["vit"]["models"][0]["texts"][0]
    with opened(browser, folder / "vit.html") as page:
        assert token(page, "rows", 0).get_attribute("aria-selected") == "true"
        picture = page.one("#inspector [data-side=columns] canvas")
        colours = (
            "const copy = document.createElement('canvas').getContext('2d', { willReadFrequently: true });"
            "copy.drawImage(arguments[0], 0, 0); return [...copy.getImageData(0, 0, 16, 16).data]"
        )
        until(browser, lambda: any(browser.execute_script(colours, picture)))
        pixels = torch.tensor(browser.execute_script(colours, picture)).view(16, 16, 4)[..., :3]
        expected = torch.tensor(unpack(record["image"]["picture"]) % 256).view(16, 16, 3)
        assert torch.equal(pixels.double(), expected)
        box, patch = picture.rect, token(page, "columns", 1 + 4 * 2 + 3).rect  # patch (2, 3)
        assert patch["x"] + patch["width"] / 2 == pytest.approx(box["x"] + box["width"] * 3.5 / 4, abs=3)
        assert patch["y"] + patch["height"] / 2 == pytest.approx(box["y"] + box["height"] * 2.5 / 4, abs=3)
        names = [row.text for row in page.all("#inspector .weights.keys .token")]
        assert names and all(name == "class" or name.startswith("patch (") for name in names)
        shades = [token(page, "columns", index).value_of_css_property("background-color") for index in range(1, 17)]
        weights = torch.tensor(unpack(record["layers"][1]["maps"])).view(4, 17, 17)[0, 0, 1:]
        opacity = [float(shade.rpartition(",")[2].strip(" )")) for shade in shades]
        assert int(torch.tensor(opacity).argmax()) == int(weights.argmax())


def test_two_image_models_select_the_same_image_position(pages_and_reports, browser):
    """Images of 16 and 32 pixels in patches of 4: 4 and 8 rows of patches, with one and two special tokens."""
    with opened(browser, pages_and_reports[0] / "pair.html") as page:
        token(page, "columns", 1 + 4 * 1 + 2).click()  # patch (1, 2)
        assert token(page, "columns", 2 + 8 * 3 + 5, column=2).get_attribute("aria-selected") == "true"
        token(page, "rows", 1, column=2).click()  # distillation
        assert token(page, "rows", 0).get_attribute("aria-selected") == "true"


def test_selection_of_models_with_and_without_special_tokens(pages_and_reports, browser):
    """A ViT with 4 x 4 patches beside the last stage of a TransNeXt, 3 x 3."""
    with opened(browser, pages_and_reports[0] / "stage.html") as page:
        assert token(page, "rows", 0, column=2).get_attribute("aria-selected") == "true"  # in place of the class token
        assert "2 last-stage layers" in page.one("#facts .column:nth-child(2)").text
        token(page, "columns", 8, column=2).click()  # patch (2, 2)
        assert token(page, "columns", 1 + 4 * 3 + 3).get_attribute("aria-selected") == "true"
