// Names of TeX, and the characters that they stand for.

function pairs(text) {
  return Object.assign(Object.create(null), Object.fromEntries(text.trim().split(/\s+/).map(pair => pair.split("="))));
}

export const GREEK = pairs(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ
  nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ
  Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω hbar=ℏ ell=ℓ Re=ℜ Im=ℑ aleph=ℵ infty=∞
  emptyset=∅ varnothing=∅ imath=ı jmath=ȷ nabla=∇ partial=∂ degree=° circ=∘ prime=′ dagger=† top=⊤ bot=⊥ angle=∠
  triangle=△ square=□ blacksquare=■ checkmark=✓ star=⋆ dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱`);

export const OPERATORS = pairs(`
  times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ leq=≤ le=≤ geq=≥ ge=≥ neq=≠ ne=≠ ll=≪ gg=≫ approx=≈ equiv=≡ cong=≅ sim=∼ simeq=≃
  propto=∝ in=∈ notin=∉ ni=∋ subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇ cup=∪ cap=∩ setminus=∖ land=∧ wedge=∧ lor=∨ vee=∨
  neg=¬ lnot=¬ forall=∀ exists=∃ nexists=∄ to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒
  Leftarrow=⇐ Leftrightarrow=⇔ iff=⟺ implies=⟹ impliedby=⟸ mapsto=↦ longrightarrow=⟶ uparrow=↑ downarrow=↓ mid=∣
  nmid=∤ parallel=∥ perp=⊥ vdash=⊢ models=⊨ therefore=∴ because=∵ oplus=⊕ ominus=⊖ otimes=⊗ odot=⊙ bullet=∙
  sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ iiint=∭ oint=∮ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigvee=⋁ bigwedge=⋀
  colon=: %=% &=& #=# $=$ _=_ prec=≺ succ=≻ doteq=≐ triangleq=≜ coloneqq=≔ lt=< gt=> backslash=\\`);

export const FUNCTIONS = [
  "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "exp", "log", "ln",
  "lg", "lim", "max", "min", "sup", "inf", "argmax", "argmin", "det", "dim", "ker", "deg", "gcd", "hom", "arg", "Pr",
  "mod",
];

// Letters of a style: Unicode has them in blocks of 26, with holes where a letter had a place of its own before.
function letters(upper, lower, digits, holes = {}) {
  return character => {
    if (holes[character]) return holes[character];
    const code = character.codePointAt(0);
    if (upper && character >= "A" && character <= "Z") return String.fromCodePoint(upper + code - 65);
    if (lower && character >= "a" && character <= "z") return String.fromCodePoint(lower + code - 97);
    return digits && character >= "0" && character <= "9" ? String.fromCodePoint(digits + code - 48) : character;
  };
}

const BOLD = letters(0x1d400, 0x1d41a, 0x1d7ce);
const DOUBLE = letters(0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" });
const SCRIPT = letters(0x1d49c, 0, 0, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ" });
const FRAKTUR = letters(0x1d504, 0x1d51e, 0, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" });
const UPRIGHT = character => character;

export const STYLED = {
  __proto__: null,
  mathbf: BOLD, boldsymbol: BOLD, bm: BOLD, mathbb: DOUBLE, mathcal: SCRIPT, mathscr: SCRIPT, mathfrak: FRAKTUR,
  mathrm: UPRIGHT, mathit: UPRIGHT, mathsf: UPRIGHT, mathtt: UPRIGHT,
};
