//! The page. The template library escapes all text from files; only drawings are inserted as they
//! are.

use humantime::format_rfc3339_seconds;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::draw::{self, Drawing};
use super::groups::{Group, groups, shown_settings, text};
use super::input::Input;
use super::plot::{Body, Data, Plot};
use super::plots::{plots, shown};
use super::{InFiles, differences, ink, systems, tables};
use crate::busy::Busy;
use crate::quantity::{Unit, extremes, quantity, spread};
use crate::results::SOFTWARE_CPUS;
use crate::results::compared::{Claims, System};

/// Rows of one table at most; the file has the others.
const MAX_ROWS: usize = 2000;

/// A page, and how many plots it has.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) html: String,
    pub(crate) nr_plots: usize,
}

/// The page of all files. An error comes from drawing.
pub(crate) fn page(inputs: &[Input]) -> Result<Page, String> {
    let groups = groups(inputs);
    let mut drawn = Vec::new();
    let mut nr_plots = 0;
    for group in &groups {
        let mut figures = Vec::new();
        for plot in plots(group, inputs) {
            figures.push(figure(&plot, nr_plots)?);
            nr_plots += 1;
        }
        drawn.push(figures);
    }
    let systems = systems::systems(inputs);
    let of_system = |system: Option<&str>| -> Vec<Markup> {
        let these = groups.iter().zip(&drawn).filter(|(group, _)| group.system == system);
        these.map(|(group, figures)| experiment(group, &groups, figures, inputs)).collect()
    };
    let html = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "slat report: " (names(inputs)) }
                // No request goes out, not even for an icon.
                link rel="icon" href="data:,";
                style { (PreEscaped(include_str!("style.css"))) (PreEscaped(ink::dark_rules())) }
            }
            body {
                header {
                    h1 { "slat report" }
                    p.note { "slat: second-level address translation. slat " (env!("CARGO_PKG_VERSION")) " wrote this page; it needs no other file." }
                    (files(inputs))
                }
                (contents(&systems, &groups))
                main {
                    (claims(inputs))
                    @if inputs.len() > 1 { (differences::markup(&groups, inputs)) }
                    @for (place, system) in systems.iter().enumerate() {
                        section id=(anchor(place)) {
                            h2 { (title(system.first)) }
                            (system.markup(inputs))
                            @for experiment in of_system(Some(&system.first.system)) { (experiment) }
                        }
                    }
                    @for (place, experiment) in (systems.len()..).zip(of_system(None)) { section id=(anchor(place)) { (experiment) } }
                }
            }
        }
    };
    Ok(Page { html: html.into_string(), nr_plots })
}

/// The table of contents, where there is more than one section: the systems, then the experiments
/// that are no part of one.
fn contents(systems: &[InFiles<'_, System>], groups: &[Group<'_>]) -> Markup {
    let of_systems = systems.iter().map(|system| title(system.first));
    let alone = groups.iter().filter(|group| group.system.is_none());
    let titles: Vec<String> = of_systems.chain(alone.map(Group::title)).collect();
    html! {
        @if titles.len() > 1 {
            nav.contents aria-label="Contents" { ul {
                @for (place, title) in titles.iter().enumerate() { li { a href=(format!("#{}", anchor(place))) { (title) } } }
            } }
        }
    }
}

fn title(system: &System) -> String {
    if system.title.is_empty() { system.system.clone() } else { format!("{}. {}", system.system, system.title) }
}

/// The name of a section in addresses.
fn anchor(place: usize) -> String {
    format!("section-{}", place + 1)
}

fn names(inputs: &[Input]) -> String {
    let labels: Vec<&str> = inputs.iter().take(3).map(|input| input.label.as_str()).collect();
    let more = if inputs.len() > 3 { ", …" } else { "" };
    format!("{}{more}", labels.join(", "))
}

/// Each file, and the machine that it was measured on.
fn files(inputs: &[Input]) -> Markup {
    html! {
        div.files { @for input in inputs { article {
            h2 { (input.label) }
            @if input.results.interrupted {
                p.warning role="note" { strong { "Interrupted: " } "figures are of the runs before." }
            }
            @if let Some(busy) = input.results.host.busy.filter(Busy::is_disturbing) { p.warning role="note" { (busy.to_string()) } }
            dl {
                dt { "File" } dd { code { (input.path.display()) } @if let Some(written) = input.written { ", " (format_rfc3339_seconds(written)) } }
                dt { "Command" } dd { code { (input.command()) } }
                dt { "Begun" } dd { (input.results.time) ", by slat " (input.results.slat) }
                @let host = &input.results.host;
                dt { "Machine" } dd {
                    (host.cpu_model) ", " (host.cpus) " CPUs, " (quantity(host.memory_bytes as f64, Unit::Bytes)) ", Linux " (host.kernel)
                }
                dt { "Measured on" } dd { (host.measured_on) @if host.measured_on == SOFTWARE_CPUS { ": threads, memory and tables are real, the CPU's address translation is a program" } }
                @if let Some(method) = &host.flush_method { dt { "TLB flush" } dd { (method) } }
                @if let Some(kvm) = &host.kvm { dt { "KVM" } dd { (kvm_facts(kvm)) } }
                @if input.results.compared.is_some() {
                    @if let Some(size) = input.results.config.get("size") { dt { "Size" } dd { (text(size)) } }
                    @for wall in input.results.results.iter().filter(|figure| figure.name == "wall") { dt { "Took" } dd { (spread(&wall.samples, wall.unit)) } }
                }
            }
        } } }
    }
}

/// KVM's translation, or all that is known about the KVM.
fn kvm_facts(kvm: &serde_json::Value) -> String {
    kvm.get("translation").map_or_else(|| text(kvm), text)
}

/// The claims of slat, and which of them hold.
fn claims(inputs: &[Input]) -> Markup {
    html! {
        @for input in inputs { @if let Some(compared) = &input.results.compared {
            @let Claims { made, held, ties, lost } = &compared.claims;
            p.claims {
                @if inputs.len() > 1 { (input.label) ": " }
                (tally(lost.is_empty(), &format!("{held} of {made} claims held")))
                ", " (ties.len()) " tied, " (lost.len()) " lost"
            }
            @if !lost.is_empty() { ul.lost { @for lost in lost { li { (tally(false, "lost")) " " (lost) } } } }
            @if !ties.is_empty() { ul.lost { @for tie in ties { li { "tie " (tie) } } } }
        } }
    }
}

/// Good or bad, as a sign, a word and a color.
pub(crate) fn tally(is_good: bool, text: &str) -> Markup {
    html! { @if is_good { span.good { "✓ " (text) } } @else { span.bad { "✗ " (text) } } }
}

/// A box that scrolls, so that the page does not.
pub(crate) fn scroll(name: &str, inside: Markup) -> Markup {
    html! { div.scroll tabindex="0" role="region" aria-label=(name) { (inside) } }
}

/// One experiment: its plots, and its figures in each file.
fn experiment(group: &Group<'_>, all: &[Group<'_>], figures: &[Markup], inputs: &[Input]) -> Markup {
    let distinct_settings = group.distinct_settings(all);
    let not_run = group.results.iter().flatten().flat_map(|result| &result.not_run);
    let left_out = group.results.iter().flatten().count().saturating_sub(shown(group, inputs).len());
    html! {
        div.experiment {
            @if group.system.is_some() { h3 { code { (group.title()) } } } @else { h2 { code { (group.title()) } } }
            @if !distinct_settings.is_empty() { p.note { (distinct_settings) } }
            @for not_run in not_run { p { strong { "Not measured: " (not_run.what) ": " } (not_run.why) } }
            @if group.results.iter().flatten().any(|result| result.interrupted) {
                p.warning role="note" { strong { "Interrupted: " } "figures are of the runs before." }
            }
            @if !figures.is_empty() {
                @if left_out > 0 { p.note { "Plots show the first and the last result." } }
                div.plots { @for figure in figures { (figure) } }
            }
            // The tables of a single result are open; those of several are closed.
            @for (input, result) in inputs.iter().zip(&group.results) { @if let Some(result) = result {
                details open[figures.is_empty() && inputs.len() == 1] {
                    summary { "All figures" @if inputs.len() > 1 { " of " (input.label) } " (" (result.results.len()) ")" }
                    p.note { (tables::caption(result)) }
                    (data_table("Figures", &tables::figures(result, spread)))
                    p.note { "Mean of the middle half ± robust deviation; 99th percentile; least–largest." }
                    (data_table("Extremes", &tables::figures(result, extremes)))
                    @if !result.published.is_empty() {
                        p.note { "Published figures are of other machines, and decide nothing." }
                        (data_table("Published", &tables::published(result)))
                    }
                    (settings(&result.config))
                }
            } }
        }
    }
}

fn settings(config: &serde_json::Value) -> Markup {
    let settings: Vec<_> = shown_settings(config).collect();
    html! {
        @if !settings.is_empty() {
            p.note { "Settings: " @for (place, (key, value)) in settings.into_iter().enumerate() { @if place > 0 { ", " } (key) " " (text(value)) } }
        }
    }
}

fn data_table(name: &str, data: &Data) -> Markup {
    html! {
        (scroll(name, html! {
            table {
                thead { tr { @for cell in &data.head { th scope="col" { (cell) } } } }
                tbody { @for row in data.rows.iter().take(MAX_ROWS) { tr {
                    @for (column, cell) in row.iter().enumerate() {
                        @if column == 0 { th scope="row" { (cell) } } @else { td { (cell) } }
                    }
                } } }
            }
        }))
        @if data.rows.len() > MAX_ROWS { p.note { "… and " (data.rows.len() - MAX_ROWS) " more in the file." } }
    }
}

/// A plot with its legend and the table of its data.
fn figure(plot: &Plot, number: usize) -> Result<Markup, String> {
    let drawing = draw::draw(plot)?;
    let legend = legend(plot)?;
    let left_out = plot.nr_left_out();
    Ok(html! {
        figure.plot {
            figcaption { (plot.title) }
            (svg(&drawing, &format!("plot{number}"), &plot.title, &plot.description))
            (legend)
            p.note {
                (plot.description)
                @if left_out > 0 { " Not drawn: " (left_out) " values that this axis cannot show (zero, negative, or out of range)." }
            }
            details { summary { "Data" } (data_table(&plot.title, &plot.data)) }
        }
    })
}

fn svg(drawing: &Drawing, id: &str, title: &str, description: &str) -> Markup {
    html! {
        svg.drawing viewBox=(format!("0 0 {} {}", drawing.width, drawing.height)) role="img"
            aria-labelledby=(format!("{id}-title {id}-desc")) {
            title id=(format!("{id}-title")) { (title) }
            desc id=(format!("{id}-desc")) { (description) }
            (PreEscaped(&drawing.elements))
        }
    }
}

/// A decorative drawing, hidden from screen readers.
fn small(drawing: &Drawing) -> Markup {
    let (width, height) = (drawing.width / 2, drawing.height / 2);
    html! {
        svg.key viewBox=(format!("0 0 {} {}", drawing.width, drawing.height)) width=(width) height=(height) aria-hidden="true" {
            (PreEscaped(&drawing.elements))
        }
    }
}

/// The names of lines or parts.
fn legend(plot: &Plot) -> Result<Markup, String> {
    let keys: Vec<(Drawing, &str)> = match &plot.body {
        Body::Series { shape, series, .. } => {
            let key = |series| draw::key(series, *shape);
            series.iter().map(|series| Ok((key(series)?, series.name.as_str()))).collect::<Result<_, String>>()?
        }
        Body::Bars { parts, .. } if parts.len() > 1 => {
            parts.iter().map(|part| Ok((draw::part_key(part)?, part.name.as_str()))).collect::<Result<_, String>>()?
        }
        Body::Bars { .. } => Vec::new(),
    };
    Ok(html! {
        @if !keys.is_empty() { ul.legend { @for (drawing, name) in &keys { li { (small(drawing)) span { (name) } } } } }
    })
}
