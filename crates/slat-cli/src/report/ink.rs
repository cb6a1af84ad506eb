//! Colors, markers and dashes. The colors differ for all kinds of color vision, and have a contrast
//! of at least 3 to 1 with their background. No two series differ by color alone.
//!
//! The drawing library writes a color into each element. The page's style sheet, generated here
//! too, replaces it where the reader's screen is dark.

use std::fmt::Write;

use plotters::style::RGBColor;

/// A color on a light page, and its replacement on a dark one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ink {
    pub(crate) light: RGBColor,
    dark: RGBColor,
}

const fn ink(light: u32, dark: u32) -> Ink {
    const fn color(rgb: u32) -> RGBColor {
        RGBColor((rgb >> 16) as u8, (rgb >> 8) as u8, rgb as u8)
    }
    Ink { light: color(light), dark: color(dark) }
}

const SERIES: [Ink; 8] = [
    ink(0x0072B2, 0x56B4E9),
    ink(0xD55E00, 0xFF8A3C),
    ink(0x008F68, 0x35C99C),
    ink(0xC2609A, 0xE6A3C8),
    ink(0xB8860B, 0xF5C242),
    ink(0x7A7A7A, 0xC8C8C8),
    ink(0x8A5A2B, 0xD2A06B),
    ink(0x6A5ACD, 0xA99DF5),
];

/// Text and axes.
pub(crate) const TEXT: Ink = ink(0x1B1F24, 0xE6E8EB);
/// Text on parts of bars, which are bright on any page.
pub(crate) const ON_PART: Ink = ink(0x000001, 0x000001);
pub(crate) const GRID: Ink = ink(0xD8DCE1, 0x3A4149);

/// How many series of one plot have different inks.
pub(crate) const NR_SERIES: usize = SERIES.len();

pub(crate) fn series(index: usize) -> Ink {
    SERIES[index % NR_SERIES]
}

/// The length of dashes and gaps, in units of the drawing; `None`: a line without gaps.
pub(crate) fn dash(index: usize) -> Option<(i32, i32)> {
    [None, Some((14, 8)), Some((4, 7)), Some((26, 8)), Some((9, 4))][index % 5]
}

/// The rules that replace colors on a dark screen. (Paper is bright.)
pub(crate) fn dark_rules() -> String {
    let mut rules = String::from("@media screen and (prefers-color-scheme:dark){");
    for ink in SERIES.iter().chain([&TEXT, &GRID]) {
        let (light, dark) = (hex(ink.light), hex(ink.dark));
        for property in ["fill", "stroke"] {
            // The library writes upper-case digits.
            let _ = write!(rules, "svg [{property}=\"{light}\"]{{{property}:{dark}}}");
        }
    }
    rules.push('}');
    rules
}

fn hex(color: RGBColor) -> String {
    format!("#{:02X}{:02X}{:02X}", color.0, color.1, color.2)
}
