//! The kind of this KVM: its modules, its translation of guest memory, its capabilities for dirty
//! logging. A figure of KVM is meaningless without them: a shadow MMU and the TDP MMU have no code
//! in common here.

use std::fs;
use std::path::Path;

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_CAP_NR_MEMSLOTS,
};
use kvm_ioctls::Kvm;
use serde_json::{Value, json};

/// Parameters of the modules that say how guest memory is translated and logged.
const PARAMETERS: [&str; 5] = ["ept", "npt", "tdp_mmu", "pml", "eager_page_split"];

const CAPABILITIES: [(&str, u32); 4] = [
    ("KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2", KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2),
    ("KVM_CAP_DIRTY_LOG_RING", KVM_CAP_DIRTY_LOG_RING),
    ("KVM_CAP_DIRTY_LOG_RING_ACQ_REL", KVM_CAP_DIRTY_LOG_RING_ACQ_REL),
    ("KVM_CAP_NR_MEMSLOTS", KVM_CAP_NR_MEMSLOTS),
];

/// What was found.
#[derive(Clone, Debug)]
pub(crate) struct KvmFacts {
    modules: Vec<String>,
    /// As `module.parameter` and its value.
    parameters: Vec<(String, String)>,
    capabilities: Vec<(&'static str, i32)>,
    api_version: i32,
}

impl KvmFacts {
    pub(super) fn read(kvm: &Kvm) -> KvmFacts {
        let all = Path::new("/sys/module");
        let names =
            fs::read_dir(all).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut modules: Vec<String> = names.filter(|name| name == "kvm" || name.starts_with("kvm_")).collect();
        modules.sort();
        let mut parameters = Vec::new();
        for module in &modules {
            for parameter in PARAMETERS {
                if let Ok(value) = fs::read_to_string(all.join(module).join("parameters").join(parameter)) {
                    parameters.push((format!("{module}.{parameter}"), value.trim().to_owned()));
                }
            }
        }
        let capabilities = CAPABILITIES.map(|(name, number)| (name, kvm.check_extension_raw(number.into()))).to_vec();
        KvmFacts { modules, parameters, capabilities, api_version: kvm.get_api_version() }
    }

    /// This KVM, by the kind of its page tables.
    pub(crate) fn name(&self) -> String {
        let translation = self.translation();
        let kind = translation.split_once(',').map_or(&*translation, |(kind, _)| kind);
        format!("KVM of this machine ({kind})")
    }

    /// The translation of guest memory, as far as the modules show it.
    fn translation(&self) -> String {
        let is_on = |name: &str| {
            self.parameters.iter().any(|(parameter, value)| {
                parameter.ends_with(&format!(".{name}")) && ["Y", "y", "1"].contains(&value.as_str())
            })
        };
        let tables = match (is_on("ept"), is_on("npt")) {
            (true, _) => "EPT",
            (_, true) => "NPT",
            _ if self.modules.iter().any(|module| module != "kvm") => {
                return "shadow page tables, as no module has ept or npt on".to_owned();
            }
            _ => return "not known, as no vendor module is visible".to_owned(),
        };
        format!("{tables}, {} MMU", if is_on("tdp_mmu") { "TDP" } else { "not the TDP" })
    }

    /// What figures of this KVM were measured on, in short.
    pub(crate) fn measured_on(&self) -> String {
        format!("hardware: KVM of this machine ({}; {})", self.module_names(), self.translation())
    }

    fn module_names(&self) -> String {
        if self.modules.is_empty() { "none visible".to_owned() } else { self.modules.join(", ") }
    }

    /// For people.
    pub(crate) fn lines(&self) -> Vec<String> {
        let parameters: Vec<String> = self.parameters.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let capabilities: Vec<String> =
            self.capabilities.iter().map(|(name, value)| format!("{name}={value}")).collect();
        vec![
            format!(
                "KVM: API {}, modules: {}, guest memory by {}; {}.",
                self.api_version,
                self.module_names(),
                self.translation(),
                parameters.join(", ")
            ),
            format!("KVM's capabilities: {}.", capabilities.join(", ")),
        ]
    }

    /// For `--json`.
    pub(crate) fn json(&self) -> Value {
        let parameters: serde_json::Map<String, Value> =
            self.parameters.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        let capabilities: serde_json::Map<String, Value> =
            self.capabilities.iter().map(|&(name, value)| (name.to_owned(), json!(value))).collect();
        json!({
            "api_version": self.api_version,
            "modules": self.modules,
            "translation": self.translation(),
            "parameters": parameters,
            "capabilities": capabilities,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_modules_show_the_translation() {
        let facts = |modules: &[&str], parameters: &[(&str, &str)]| KvmFacts {
            modules: modules.iter().map(|&name| name.to_owned()).collect(),
            parameters: parameters.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            capabilities: Vec::new(),
            api_version: 12,
        };
        for (modules, parameters, expected) in [
            (&["kvm", "kvm_intel"][..], &[("kvm.tdp_mmu", "Y"), ("kvm_intel.ept", "Y")][..], "EPT, TDP MMU"),
            (&["kvm", "kvm_amd"], &[("kvm.tdp_mmu", "N"), ("kvm_amd.npt", "1")], "NPT, not the TDP MMU"),
            (&["kvm", "kvm_intel"], &[("kvm_intel.ept", "N")], "shadow page tables"),
            (&["kvm", "kvm_other"], &[("kvm.tdp_mmu", "Y")], "shadow page tables"),
            (&["kvm"], &[], "not known"),
            (&[], &[], "not known"),
        ] {
            let facts = facts(modules, parameters);
            assert!(facts.translation().starts_with(expected), "{facts:?}");
            let kind = expected.split_once(',').map_or(expected, |(kind, _)| kind);
            assert_eq!(facts.name(), format!("KVM of this machine ({kind})"));
            assert_eq!(facts.json()["api_version"], 12);
            assert!(facts.lines()[0].contains(expected));
        }
    }
}
